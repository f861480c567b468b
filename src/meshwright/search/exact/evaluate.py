"""Find the fastest choice of a shape that fits: fit every group, simulate the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.cost.layers.collectives import send_seconds
from meshwright.cost.step.pipeline import StageTimes, ends
from meshwright.plans import in_flight
from meshwright.search.bounds.lower_bounds import ending, free_times, joined, summed
from meshwright.search.bounds.memory_fit import STEPS, Load, Range, Settled, extras, settle
from meshwright.search.bounds.pipeline_shapes import Cuts, Found, Setting, Shape, received, stages_of
from meshwright.search.bounds.prices import Prices
from meshwright.search.bounds.step_time import least_ends, membership, most_alive, pick
from meshwright.search.space.activation_modes import Mode
from meshwright.search.space.cuts import Family

Array = Any
_POWER = 24  # of the mean over groups
_STEP = 1 / 8
_LEVELS = np.arange(9) * _STEP  # most optimizer states that any group offloads


def best_of(setting: Setting, shape: Shape, cuts: Cuts, table: Prices, modes: list[Mode], limit: float) -> Found | None:
    """Return the fastest choice of a table that fits and takes less than `limit` seconds."""
    if not setting.stagewise and shape.groups > 1 and len(modes) > 1:
        return _alike(setting, shape, cuts, table, modes, limit)
    if shape.groups == 1 or not table.movable.any():
        return _best_of(setting, shape, cuts, table, modes, limit, weigh=True)
    # The group with the longest update decides: all may offload as much as it does.
    may, (settled,) = _may_win(setting, shape, Family([cuts], setting.chain.counts), table, modes, limit)
    near = np.flatnonzero(may[0])
    if not len(near):
        return None
    away = np.stack([s.away[near] for s in settled], axis=1)
    if not away.any():
        return _best_of(setting, shape, cuts, table, modes, limit, weigh=True, settled=settled)
    low, high = away.min(axis=1, keepdims=True), away.max(axis=1, keepdims=True)
    # If no group would offload alone, none does; else try levels near its own value, and a step more.
    some = (low - _STEP < _LEVELS) & (high + 2 * _STEP * (high > 0) + 1e-9 > _LEVELS)
    at, level = np.nonzero(some)
    rows, caps = near[at], _LEVELS[level]
    found = _best_of(setting, shape, cuts, table.take(rows).capped(caps), modes, limit, weigh=False)
    if found is None:
        return None
    parts = tuple(_rounded(float(caps[found.row]) * part) for part in found.away)
    return replace(found, table=table, row=int(rows[found.row]), away=parts)


def may_win(setting: Setting, shape: Shape, cuts: Family, table: Prices, modes: list[Mode], limit: float) -> Array:
    """Return (cuts, choice): True if it may be below a limit, each group as if its update were the longest."""
    return _may_win(setting, shape, cuts, table, modes, limit)[0]


def _may_win(
    setting: Setting, shape: Shape, cuts: Family, table: Prices, modes: list[Mode], limit: float
) -> tuple[Array, list[list[Settled]]]:
    """Return the result of `may_win`, and the fit of all groups under each of the cuts."""
    free = free_times(setting, shape, cuts, table.columns)
    settled = _settled(setting, shape, cuts, table, modes, free, limit, weigh=True)
    plain = (free.forward + free.backward) @ membership(shape.schedule, shape.stages)
    cost = np.concatenate([np.stack([s.cost for s in groups], axis=1) for groups in settled])
    extra = np.maximum(cost - plain, 0.0)
    late, update = ending(setting, shape, cuts, table, free)
    done = least_ends(shape.schedule, shape.groups, shape.micro_batches, free, extra, 0.0)
    hidden = np.minimum((1 - setting.constants.contention) * extra, late)
    least = setting.total(shape, (done + late - hidden + update).max(axis=1))
    return (least < limit).reshape(len(cuts), -1), settled


def _settled(
    setting: Setting, shape: Shape, cuts: Family, table: Prices, modes: list[Mode], free: StageTimes, limit: float, *,
    weigh: bool,
) -> list[list[Settled]]:  # fmt: skip
    """Return the fit of all groups under all cuts."""
    most = setting.within(shape, limit) / shape.micro_batches  # seconds per micro-batch of a group
    ample = roomy(setting, shape, cuts, table, modes).all(axis=2)
    tight = [(cut, group) for q, cut in enumerate(cuts.cuts) for group in range(shape.groups) if not ample[q, group]]
    found = iter(_settle(setting, shape, tight, table, modes, {}, most, weigh=weigh))
    every, count = list(enumerate(stages_of(shape))), len(table.choices)

    def groups(q: int, cut: Cuts) -> list[Settled]:
        mine = pick(free, np.arange(q * count, (q + 1) * count)) if ample[q].any() and len(cuts) > 1 else free
        return [_plain(mine, stages, cut) if ample[q, group] else next(found) for group, stages in every]

    return [groups(q, cut) for q, cut in enumerate(cuts.cuts)]


def _best_of(
    setting: Setting, shape: Shape, cuts: Cuts, table: Prices, modes: list[Mode], limit: float, *, weigh: bool,
    settled: list[Settled] | None = None,
) -> Found | None:  # fmt: skip
    """Return the fastest choice below `limit`; `weigh`: the updates of groups not `settled` yet count."""
    family = Family([cuts], setting.chain.counts)
    free = free_times(setting, shape, family, table.columns)
    settled = settled or _settled(setting, shape, family, table, modes, free, limit, weigh=weigh)[0]
    fits = np.logical_and.reduce([s.fits for s in settled])
    rows = np.flatnonzero(fits)
    if not len(rows):
        return None
    part = table
    times = _times(free, shape, [settled])
    if len(rows) < len(table.choices):
        part, times = table.take(rows), pick(times, rows)
    away = np.stack([s.away[rows] for s in settled], axis=1)
    late, update = ending(setting, shape, family, part, times, _all_tied(setting, shape, [cuts], part), away)
    pipeline = (shape.schedule, shape.groups, shape.micro_batches)
    bound = setting.total(shape, joined(least_ends(*pipeline, times), late, update))
    order, found = np.argsort(bound, kind="stable"), None
    for start in _batches(len(order)):  # a simulation takes longer than its bound
        near = order[start][bound[order[start]] < limit]
        if not len(near):
            break
        seconds, spread = _simulated(setting, shape, pick(times, near), late[near], update[near])
        one = int(np.argmin(seconds))
        if seconds[one] < limit:
            limit, row = float(seconds[one]), int(rows[near[one]])
            found = Found(limit, shape, cuts, table, row, *_modes(settled, row), float(spread[one]))
    return found


def _batches(count: int) -> Iterator[slice]:
    """Yield the first alone, a few, then the rest."""
    edges = [0, 1, *range(5, count, 64), count]
    return (slice(low, high) for low, high in pairwise(edges) if low < min(high, count))


def best_cuts(
    setting: Setting, shape: Shape, cuts: Sequence[Cuts], table: Prices, modes: list[Mode], limit: float,
    known: dict[object, Settled], tried: int, cap: float,
) -> list[Found]:  # fmt: skip
    """Return one choice (all that the table holds) with the `tried` most promising cuts, simulated.

    Of several groups none offloads more than `cap` of its optimizer states.
    """
    if not cuts:
        return []
    weigh = shape.groups == 1
    table = table if weigh else table.capped(np.array([cap]))
    most = setting.within(shape, limit) / shape.micro_batches
    family = Family(cuts, setting.chain.counts)
    free = free_times(setting, shape, family, table.columns)
    ample = roomy(setting, shape, family, table, modes)[:, :, 0].tolist()
    mine = stages_of(shape).tolist()
    places = [[(group, *((cut[s], cut[s + 1]) for s in mine[group])) for group in range(shape.groups)] for cut in cuts]
    tight: dict[object, tuple[Cuts, int]] = {}
    here: dict[object, Settled] = {}
    for q, cut in enumerate(cuts):
        for group, key in enumerate(places[q]):
            if key in here or key in tight:
                continue
            if ample[q][group]:
                here[key] = _plain(pick(free, np.array([q])), mine[group], cut)
            else:
                tight[key] = (cut, group)
    settled = _settle(setting, shape, list(tight.values()), table, modes, known, most, weigh=weigh)
    here |= dict(zip(tight, settled, strict=True))
    fits = [q for q, keys in enumerate(places) if all(here[key].fits[0] for key in keys)]
    every = [[here[key] for key in places[q]] for q in fits]
    if not fits:
        return []
    kept = [cuts[q] for q in fits]
    family = Family(kept, setting.chain.counts)
    times = _times(pick(free, np.array(fits)), shape, every)
    away = np.array([[float(s.away[0]) for s in row] for row in every])
    late, update = ending(setting, shape, family, table, times, _all_tied(setting, shape, kept, table), away)
    pipeline = (shape.schedule, shape.groups, shape.micro_batches)
    bound = setting.total(shape, joined(least_ends(*pipeline, times), late, update))
    near = np.argsort(bound, kind="stable")[:tried]
    near = near[bound[near] < limit]
    if not len(near):
        return []
    seconds, spread = _simulated(setting, shape, pick(times, near), late[near], update[near])
    return [
        Found(
            float(seconds[i]), shape, kept[q], table, 0, *_modes(every[q], 0, 1.0 if weigh else cap), float(spread[i])
        )
        for i, q in enumerate(near)
        if seconds[i] < limit
    ]


def _simulated(setting: Setting, shape: Shape, times: StageTimes, late: Array, update: Array) -> tuple[Array, Array]:
    """Return (candidate,): seconds of the step, and a mean over groups that the slowest dominate."""
    exact = ends(shape.schedule, shape.groups, shape.micro_batches, times)
    seconds = setting.total(shape, joined(exact, late, update))
    slowest = exact.max(axis=1, keepdims=True)
    return seconds, seconds * ((exact / slowest) ** _POWER).mean(axis=1) ** (1 / _POWER)


def _modes(
    settled: list[Settled], row: int, cap: float = 1.0
) -> tuple[tuple[tuple[int, int, int], ...], tuple[float, ...]]:
    """Return per group its modes, and the offloaded part of its optimizer states."""
    modes = tuple((int(s.first[row]), int(s.second[row]), int(s.split[row])) for s in settled)
    return modes, tuple(_rounded(cap * float(s.away[row])) for s in settled)


def _rounded(part: float) -> float:
    """Return the nearest multiple of 1 / 128, without rounding errors."""
    return round(part * STEPS) / STEPS


def _alike(setting: Setting, shape: Shape, cuts: Cuts, table: Prices, modes: list[Mode], limit: float) -> Found | None:
    """Return the fastest choice with one mode for all stages."""
    best = None
    for i, mode in enumerate(modes):
        found = best_of(setting, shape, cuts, table.under(i), [mode], best.seconds if best else limit)
        if found:
            same = tuple((i, i, split) for _, _, split in found.modes)
            best = replace(found, table=table, modes=same)
    return best


def _plain(free: StageTimes, stages: Array, cuts: Cuts) -> Settled:
    """Return the fit of a group that keeps everything."""
    count = len(free.forward)
    none, start = np.zeros(count, dtype=np.int64), cuts[stages[0]]
    both = (free.forward[:, stages], free.backward[:, stages])
    cost = both[0].sum(axis=1) + both[1].sum(axis=1)
    return Settled(np.ones(count, dtype=bool), *both, none, none, none + start, np.zeros(count), cost, start)


def roomy(setting: Setting, shape: Shape, cuts: Family, table: Prices, modes: list[Mode]) -> Array:
    """Return (cuts, group, choice): True if a group surely fits without recompute."""
    room, chain = setting.room, setting.chain
    if modes[0] != Mode():
        return np.zeros((len(cuts), shape.groups, len(table.choices)), dtype=bool)
    most = most_alive(shape.schedule, shape.groups, shape.micro_batches)[:, None]  # (group, 1)
    held = cuts.held[:, stages_of(shape)]
    every = held.sum(axis=2)
    more = extras(chain, table, chain.every_need, setting.gradient_bytes)
    flying = most * (held @ table.kept[0]).max(axis=2)
    states, host = summed(every, table.states + table.movable), summed(every, table.host)
    if more:
        flying = flying + most * more.kept[0]
        states, host = states + more.states + more.movable, host + more.host
    moment = table.moment[0].max(axis=0) + table.buffers
    need = states + room.overhead + room.loose * (received(setting, shape, cuts, table) + flying + moment)
    return (need <= room.memory) & ((host <= room.host) | (host <= 0))


def _settle(
    setting: Setting, shape: Shape, groups: list[tuple[Cuts, int]], table: Prices, modes: list[Mode],
    known: dict[object, Settled], most: float, *, weigh: bool,
) -> list[Settled]:  # fmt: skip
    """Return the modes of some groups under some cuts; equal layers and micro-batches in flight are fitted once."""
    chain, counts = setting.chain, setting.chain.counts
    keys, loads, cap = [], {}, table.cap.tobytes()
    for cuts, group in groups:
        held = shape.ranges(cuts, group)
        mixes = in_flight(shape.schedule, shape.groups, shape.micro_batches, group)
        elsewhere = chain.elsewhere(held)
        ends_here = (held[0][0] == 0, held[-1][1] == len(chain.sort))
        # The result depends on the layers of a group and on its needs from elsewhere, not on its position.
        key = (
            cap,
            mixes,
            ends_here,
            elsewhere,
            *((int(chain.sort[a]), (counts[b] - counts[a]).tobytes()) for a, b in held),
        )
        keys.append((key, held[0][0]))
        if key not in known and key not in loads:
            more = extras(chain, table, elsewhere, setting.gradient_bytes)
            buffers = received(setting, shape, Family([cuts], counts), table)[0, group]
            loads[key] = Load(held, mixes, more, buffers)
    if loads:
        rest = (setting.room, shape.micro_batches)
        new = settle(chain, table, modes, list(loads.values()), *rest, mixed=setting.mixed, most=most, weigh=weigh)
        known.update(zip(loads, new, strict=True))
    found = []
    for key, start in keys:
        same = known[key]
        found.append(same if same.start == start else replace(same, split=same.split + start - same.start, start=start))
    return found


def _times(free: StageTimes, shape: Shape, settled: list[list[Settled]]) -> StageTimes:
    """Return the times of all stages under the fitted modes: one cut with several choices, or several cuts with one."""
    mine = stages_of(shape).reshape(-1)
    forward, backward = np.empty_like(free.forward), np.empty_like(free.backward)
    forward[:, mine] = np.concatenate([np.concatenate([s.forward for s in row], axis=1) for row in settled])
    backward[:, mine] = np.concatenate([np.concatenate([s.backward for s in row], axis=1) for row in settled])
    return replace(free, forward=forward, backward=backward)


def _all_tied(setting: Setting, shape: Shape, cuts: Sequence[Cuts], table: Prices) -> dict[int, Array]:
    """Return by group, for each cut or choice: seconds of communication for gradients of tied weights."""
    if not setting.chain.tied:
        return {}
    known: dict[object, Array] = {}

    def tied(cut: Cuts, group: int) -> Array:
        held = shape.ranges(cut, group)
        key = (group, setting.chain.elsewhere(held))
        if key not in known:
            known[key] = _tied(setting, shape, held, group, table)
        return known[key]

    groups = range(1, shape.groups)
    if len(cuts) == 1:
        return {group: tied(cuts[0], group) for group in groups}
    return {group: np.concatenate([tied(cut, group) for cut in cuts]) for group in groups}


def _tied(setting: Setting, shape: Shape, held: list[Range], group: int, table: Prices) -> Array:
    """Return (choice,): seconds of communication for one group's gradients of tied weights."""
    elsewhere = setting.chain.elsewhere(held)
    more = extras(setting.chain, table, elsewhere, setting.gradient_bytes)
    if more is None:
        return np.zeros(len(table.choices))
    cluster, here = setting.job.cluster, group * shape.devices
    fixed = send_seconds(cluster, 0.0, here, 0, setting.constants)
    per_byte = (send_seconds(cluster, 1e9, here, 0, setting.constants) - fixed) / 1e9
    return 2 * np.where(more.copied > 0, more.copied * per_byte + fixed, 0.0)
