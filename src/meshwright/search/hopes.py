"""Which grids may win in a pipeline, before they have ZeRO levels and a place for their states."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.search.bounds import quick_seconds
from meshwright.search.cuts import Cutter
from meshwright.search.prices import Columns
from meshwright.search.shapes import Setting, Shape, homes_of
from meshwright.search.timed import Timed
from meshwright.search.timing import SPLIT

Array = Any
_SEVERAL = 8  # grids that are bounded together first


def averaged(setting: Setting, cutter: Cutter, shape: Shape, work: Array, columns: Columns) -> Array:
    """(choice,): no plan is faster, by the average over the groups of what stands before them and their work."""
    around = columns[0] if shape.schedule.name in SPLIT else columns[0] + columns[1]
    lead = cutter.lead(homes_of(shape), shape.devices, shape.micro_batches)
    before = (lead @ around).min(axis=0)
    return setting.total(shape, (before + work) / shape.groups)


def hopeful(
    setting: Setting, cutter: Cutter, shape: Shape, rows: Array, bare: Timed, work: Array, limit: float
) -> Array:
    """Of some grids those that may win with one of the cuts, bubble included.

    `work`: seconds of all micro-batches in all layers, of each.
    """
    cuts = cutter.cuts(homes_of(shape), shape.devices, shape.micro_batches)
    if not len(cuts):
        return rows[:0]
    columns = tuple(column[:, rows] for column in bare.columns)
    part = np.flatnonzero(averaged(setting, cutter, shape, work, columns) < limit)
    if len(part) > _SEVERAL:  # were one of them best in every respect
        ideal = tuple(column[:, part].min(axis=1, keepdims=True) for column in columns)
        part = part if quick_seconds(setting, shape, cuts, ideal).min() < limit else part[:0]
    if not len(part):
        return rows[:0]
    bound = quick_seconds(setting, shape, cuts, tuple(column[:, part] for column in columns)).min(axis=0)
    return rows[part[bound < limit]]


def spare(setting: Setting, bare: Timed, wanted: list[tuple[Shape, Array]], limit: float) -> Array:
    """(grid,): seconds that all groups together may spend on the end of a step, in the pipeline that leaves most."""
    work = setting.chain.counts[-1] @ (bare.forward + bare.backward)
    found = np.zeros(len(work))
    for shape, rows in wanted:
        left = shape.groups * setting.within(shape, limit) - shape.micro_batches * work[rows]
        found[rows] = np.maximum(found[rows], left)
    return found
