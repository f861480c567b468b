"""The fastest choice of a shape that fits: every group settled, the step simulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from meshwright.cost.collectives import send_seconds
from meshwright.plan import in_flight
from meshwright.plan.schedule import group_of_stage
from meshwright.search.modes import Mode
from meshwright.search.prices import Prices
from meshwright.search.shapes import Cuts, Found, Setting, Shape, received, sends
from meshwright.search.stages import Range, Settled, extras, settle, sums
from meshwright.search.timing import StageTimes, ends, least_ends, pick

Array = Any


def best_of(setting: Setting, shape: Shape, cuts: Cuts, table: Prices, modes: list[Mode], limit: float) -> Found | None:
    """The fastest choice of a table that fits and takes less than `limit` seconds."""
    known: dict[object, Settled] = {}
    settled = [_settle(setting, shape, cuts, table, modes, group, known) for group in range(shape.groups)]
    fits = np.logical_and.reduce([s.fits for s in settled])
    rows = np.flatnonzero(fits)
    if not len(rows):
        return None
    part = table.take(rows)
    times = _times(setting, shape, cuts, part, [_taken(s, rows) for s in settled])
    bound = _finish(
        setting, shape, cuts, part, times, least_ends(shape.schedule, shape.groups, shape.micro_batches, times)
    )
    near = np.flatnonzero(bound < limit)
    if not len(near):
        return None
    near = near[np.argsort(bound[near], kind="stable")][:64]
    picked = pick(times, near)
    exact = ends(shape.schedule, shape.groups, shape.micro_batches, picked)
    seconds = _finish(setting, shape, cuts, part.take(near), picked, exact)
    one = int(np.argmin(seconds))
    if seconds[one] >= limit:
        return None
    row = int(rows[near[one]])
    chosen = tuple((int(s.first[row]), int(s.second[row]), int(s.split[row])) for s in settled)
    return Found(float(seconds[one]), shape, cuts, table, row, chosen)


def _taken(settled: Settled, rows: Array) -> Settled:
    arrays = {name: getattr(settled, name)[rows] for name in settled.__dataclass_fields__ if name != "start"}
    return replace(settled, **arrays)


def _settle(
    setting: Setting, shape: Shape, cuts: Cuts, table: Prices, modes: list[Mode], group: int,
    known: dict[object, Settled],
) -> Settled:  # fmt: skip
    """The modes of one group; groups with the same layers and as much in flight are settled once."""
    held = shape.ranges(cuts, group)
    more = extras(setting.job, setting.chain, table, held, setting.runtime, setting.gradient_bytes)
    mixes = in_flight(shape.schedule, shape.groups, shape.micro_batches, group)
    counts = setting.chain.counts
    ends_here = (held[0][0] == 0, held[-1][1] == len(setting.chain.sort))
    key = (mixes, ends_here, *((int(setting.chain.sort[a]), (counts[b] - counts[a]).tobytes()) for a, b in held))
    if more is None and key in known:
        same = known[key]
        return replace(same, split=same.split + held[0][0] - same.start, start=held[0][0])
    buffers = received(setting, shape, [cuts], table)[0, group]
    found = settle(setting.chain, table, modes, held, mixes, setting.room, more, buffers, mixed=setting.mixed)
    if more is None and len(held) == 1:
        known[key] = found
    return found


def _times(setting: Setting, shape: Shape, cuts: Cuts, table: Prices, settled: list[Settled] | None) -> StageTimes:
    """Times of all stages; without settled modes as if nothing had to be repeated."""
    chain, count = setting.chain, len(table.choices)
    forward, backward, weight = (np.zeros((count, shape.stages)) for _ in range(3))
    seen = [0] * shape.groups
    for s in range(shape.stages):
        where, group = (cuts[s], cuts[s + 1]), group_of_stage(shape.schedule, shape.stages, s)
        weight[:, s] = sums(chain, where, table.weight)
        if settled is None:
            forward[:, s] = sums(chain, where, table.forward[0])
            backward[:, s] = sums(chain, where, table.backward[0])
        else:
            forward[:, s] = settled[group].forward[:, seen[group]]
            backward[:, s] = settled[group].backward[:, seen[group]]
        seen[group] += 1
    send = sends(setting, shape, table.passed_on[chain.sort[np.array(cuts[1:-1], dtype=np.int64) - 1]].T)
    return StageTimes(forward, backward, weight, send, send * setting.blocking)


def _finish(setting: Setting, shape: Shape, cuts: Cuts, table: Prices, times: StageTimes, done: Array) -> Array:
    """The whole step from when each group has done its last action: gradients, optimizer, stragglers."""
    chain, runtime, slow = setting.chain, setting.runtime, setting.constants.contention
    late = np.zeros_like(done)
    update = np.zeros_like(done)
    for group in range(shape.groups):
        held = shape.ranges(cuts, group)
        mine = [s for s in range(shape.stages) if group_of_stage(shape.schedule, shape.stages, s) == group]
        reduce, gather = (sum(sums(chain, where, part) for where in held) for part in (table.reduce, table.gather))
        present = np.unique(np.concatenate([chain.sort[low:high] for low, high in held]))
        reduce = reduce + table.once[0, present].max(axis=0) + _tied(setting, shape, held, group, table)
        gather = gather + table.once[1, present].max(axis=0)
        for moved, window, hides in (
            (reduce, times.backward[:, mine].sum(axis=1), runtime.overlap_gradients),
            (gather, times.forward[:, mine].sum(axis=1), runtime.overlap_parameters),
        ):
            under = np.minimum(moved, window) if hides else 0.0
            late[:, group] += moved - under + slow * under
        update[:, group] = sum(sums(chain, where, table.update) for where in held)
    return setting.total(shape, (done + late).max(axis=1) + update.max(axis=1))


def _tied(setting: Setting, shape: Shape, held: list[Range], group: int, table: Prices) -> Array:
    more = extras(setting.job, setting.chain, table, held, setting.runtime, setting.gradient_bytes)
    if more is None or group == 0:
        return 0.0
    cluster, here = setting.job.cluster, group * shape.devices
    fixed = send_seconds(cluster, 0.0, here, 0, setting.constants)
    per_byte = (send_seconds(cluster, 1e9, here, 0, setting.constants) - fixed) / 1e9
    return 2 * np.where(more.copied > 0, more.copied * per_byte + fixed, 0.0)
