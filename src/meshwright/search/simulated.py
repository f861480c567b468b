"""The fastest choice of a shape that fits: every group settled, the step simulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from meshwright.cost.collectives import send_seconds
from meshwright.plan import in_flight
from meshwright.search.bounds import ending, joined
from meshwright.search.cuts import Family
from meshwright.search.modes import Mode
from meshwright.search.prices import Prices
from meshwright.search.shapes import Cuts, Found, Setting, Shape, received, sends, stages_of
from meshwright.search.stages import Range, Settled, extras, settle
from meshwright.search.timing import StageTimes, ends, least_ends, pick

Array = Any
_POWER = 24  # of the mean over groups


def best_of(
    setting: Setting, shape: Shape, cuts: Cuts, table: Prices, modes: list[Mode], limit: float,
    known: dict[object, Settled] | None = None,
) -> Found | None:  # fmt: skip
    """The fastest choice of a table that fits and takes less than `limit` seconds.

    `known` keeps how groups were settled, for calls with the same table and other cuts.
    """
    known = {} if known is None else known
    if not setting.stagewise and shape.groups > 1 and len(modes) > 1:
        return _alike(setting, shape, cuts, table, modes, limit)
    most = setting.within(shape, limit) / shape.micro_batches  # seconds of one micro-batch that a group may take
    settled = [_settle(setting, shape, cuts, table, modes, group, known, most) for group in range(shape.groups)]
    fits = np.logical_and.reduce([s.fits for s in settled])
    rows = np.flatnonzero(fits)
    if not len(rows):
        return None
    part = table
    if len(rows) < len(table.choices):
        part, taken = table.take(rows), [_taken(s, rows) for s in settled]
    else:
        taken = settled
    times = _times(setting, shape, cuts, part, taken)
    late, update = _ending(setting, shape, cuts, part, times)
    pipeline = (shape.schedule, shape.groups, shape.micro_batches)
    near = np.arange(len(rows))
    if len(rows) > 1:  # a simulation takes longer than its bound
        bound = setting.total(shape, joined(least_ends(*pipeline, times), late, update))
        near = np.flatnonzero(bound < limit)
        near = near[np.argsort(bound[near], kind="stable")][:64]
    if not len(near):
        return None
    exact = ends(*pipeline, pick(times, near))
    seconds = setting.total(shape, joined(exact, late[near], update[near]))
    one = int(np.argmin(seconds))
    slowest = exact[one].max()
    spread = float(seconds[one] * ((exact[one] / slowest) ** _POWER).mean() ** (1 / _POWER))
    if seconds[one] >= limit:
        return None
    row = int(rows[near[one]])
    chosen = tuple((int(s.first[row]), int(s.second[row]), int(s.split[row])) for s in settled)
    return Found(float(seconds[one]), shape, cuts, table, row, chosen, spread)


def _alike(setting: Setting, shape: Shape, cuts: Cuts, table: Prices, modes: list[Mode], limit: float) -> Found | None:
    """The same with one mode for all stages."""
    best = None
    for i, mode in enumerate(modes):
        found = best_of(setting, shape, cuts, table.under(i), [mode], best.seconds if best else limit)
        if found:
            same = tuple((i, i, split) for _, _, split in found.modes)
            best = replace(found, table=table, modes=same)
    return best


def _taken(settled: Settled, rows: Array) -> Settled:
    arrays = {name: getattr(settled, name)[rows] for name in settled.__dataclass_fields__ if name != "start"}
    return replace(settled, **arrays)


def _settle(
    setting: Setting, shape: Shape, cuts: Cuts, table: Prices, modes: list[Mode], group: int,
    known: dict[object, Settled], most: float,
) -> Settled:  # fmt: skip
    """The modes of one group; groups with the same layers and as much in flight are settled once."""
    chain, held = setting.chain, shape.ranges(cuts, group)
    mixes = in_flight(shape.schedule, shape.groups, shape.micro_batches, group)
    counts, special = chain.counts, chain.any_special(held)
    ends_here = (held[0][0] == 0, held[-1][1] == len(chain.sort))
    key: tuple[object, ...] = (mixes, *held)
    if not special:  # what a group holds matters, not where it stands
        key = (mixes, ends_here, *((int(chain.sort[a]), (counts[b] - counts[a]).tobytes()) for a, b in held))
    if key in known:
        same = known[key]
        return replace(same, split=same.split + held[0][0] - same.start, start=held[0][0])
    more = extras(setting.job, chain, table, held, setting.runtime, setting.gradient_bytes) if special else None
    buffers = received(setting, shape, Family([cuts], counts), table)[0, group]
    known[key] = settle(chain, table, modes, held, mixes, setting.room, more, buffers, mixed=setting.mixed, most=most)
    return known[key]


def _times(setting: Setting, shape: Shape, cuts: Cuts, table: Prices, settled: list[Settled]) -> StageTimes:
    """Times of all stages under the settled modes."""
    chain, count = setting.chain, len(table.choices)
    forward, backward = (np.zeros((count, shape.stages)) for _ in range(2))
    for group, mine in enumerate(stages_of(shape)):
        forward[:, mine], backward[:, mine] = settled[group].forward, settled[group].backward
    where = np.array(cuts)
    weight = np.einsum("ks,sc->ck", chain.counts[where[1:]] - chain.counts[where[:-1]], table.weight)
    send = sends(setting, shape, table.passed_on[chain.sort[where[1:-1] - 1]].T)
    return StageTimes(forward, backward, weight, send, send * setting.blocking)


def _ending(setting: Setting, shape: Shape, cuts: Cuts, table: Prices, times: StageTimes) -> tuple[Array, Array]:
    """(choice, group): what follows the last micro-batch, gradients of tied weights included; and the update."""
    tied = {g: _tied(setting, shape, shape.ranges(cuts, g), g, table) for g in range(1, shape.groups)}
    return ending(setting, shape, Family([cuts], setting.chain.counts), table, times, tied)


def _tied(setting: Setting, shape: Shape, held: list[Range], group: int, table: Prices) -> Array:
    if not setting.chain.any_tied(held):
        return 0.0
    more = extras(setting.job, setting.chain, table, held, setting.runtime, setting.gradient_bytes)
    assert more is not None
    cluster, here = setting.job.cluster, group * shape.devices
    fixed = send_seconds(cluster, 0.0, here, 0, setting.constants)
    per_byte = (send_seconds(cluster, 1e9, here, 0, setting.constants) - fixed) / 1e9
    return 2 * np.where(more.copied > 0, more.copied * per_byte + fixed, 0.0)
