"""Give every layer its own configuration: the chain problem of the best shape, solved exactly or by an open solver.

The search gives all layers of a stage one grid, one ZeRO level and up to two modes. Here each layer chooses among the
configurations that the search kept for the same stage size and micro-batch, and cuts are free. The step is UniAP's
closed form (all stages and links, and m - 1 times the slowest). The plan is then priced like any other, and replaces
the search's only if it is faster.
"""

from __future__ import annotations

import dataclasses
from itertools import groupby
from typing import Any

import numpy as np
from msgspec.structs import replace

from meshwright.cost.estimate import estimate
from meshwright.cost.layers.collectives import send_seconds
from meshwright.cost.layers.stage import grid, relayout_seconds
from meshwright.cost.memory.device_memory import plan_memory
from meshwright.plans import Pipeline, Plan, Span, Stage, in_flight
from meshwright.plans.spans import device_text, span_name
from meshwright.search.bounds.pipeline_shapes import Found
from meshwright.search.bounds.prices import prices
from meshwright.search.bounds.relaxation import hull
from meshwright.search.exact.plan_builder import repeated
from meshwright.search.exact.solve import Search
from meshwright.search.refine.chain import solve
from meshwright.search.refine.chain_paths import Instance, TooMuch
from meshwright.search.space.activation_modes import Mode
from meshwright.search.space.candidates import joined

Array = Any
_WORTH = 1e-5  # a plan of many spans must be faster by this part
_NEAR = 1.06  # of the best plan's time: shapes below it get per-layer choices
_ROUGH = 1.003  # the closed form of two pipelines of a shape differs about as much as their steps do
_STARTS = 2
_MOST_LAYERS = 100  # longer chains need an explicit solver for per-layer choices
_TRIES = 4
_MOST_CHOICES = 4000  # that are priced for it
_ENOUGH = 2e-3  # of a step: the last gains take most of the time to find
_EFFORT = 5e5  # paths, a few tenths of a second; above it, layers do not choose
_WAYS = 6  # choices x modes that a layer may choose from
Way = tuple[int, int]  # row of the table, mode


def best_layered(search: Search, solver: str = "exact", time_limit: float | None = None) -> tuple[float, Plan] | None:
    """Return the fastest such plan from the best shapes and its seconds, if it beats the search's."""
    if not search.best or search.late or not (search.limits.allows("mixed") and search.limits.allows("uneven")):
        return None
    if solver == "exact" and len(search.job.model.layers) > _MOST_LAYERS:
        return None
    near = [f for f in search.by_shape.values() if f.seconds < _NEAR * search.limit and f.shape.schedule.virtual == 1]
    near.sort(key=lambda found: found.seconds)
    better: list[tuple[float, Plan]] = []
    for found in near[:_STARTS]:
        plan = layered(search, found, solver, time_limit, min((seconds for seconds, _ in better), default=np.inf))
        priced = estimate(search.job, plan, search.runtime, search.constants) if plan else None
        if plan and priced and priced.fits and priced.step_seconds < search.limit * (1 - _WORTH):
            better.append((priced.step_seconds, plan))
    return min(better, key=lambda item: item[0], default=None)


def layered(
    search: Search, found: Found, solver: str = "exact", time_limit: float | None = None, most: float = np.inf
) -> Plan | None:
    """Return the best plan of a shape with per-layer choices.

    It is None if the shape has virtual stages, or the exact search proves that none takes less than `most` seconds.
    """
    if found.shape.schedule.virtual > 1:
        return None
    relief = _relief(search, found) if any(found.away) else [0.0] * found.shape.stages
    found = with_all_choices(search, found)
    ways = ways_of(search, found)
    instance = instance_of(search, found, ways)
    rough = _ROUGH if found.shape.groups > 1 else 1.0
    target = rough * search.setting.within(found.shape, min(most, search.limit))
    limit = _closed_form(found, ways, instance, relief) * target / search.setting.within(found.shape, found.seconds)
    for _ in range(_TRIES):
        solved = _solved(instance, solver, time_limit, limit)
        if solved is None:
            return None
        plan = _plan(search, found, ways, *solved)
        short = [row.short_by for row in plan_memory(plan, search.job, search.runtime)]
        if not any(short):
            return plan
        # Buffers of other grids and partial blocks differ a little from those of the chain problem.
        instance = dataclasses.replace(instance, memory=np.maximum(instance.memory - 1.02 * np.array(short), 0.0))
    return None


def _relief(search: Search, found: Found) -> list[float]:
    """Return per stage the seconds per micro-batch that it saves by optimizer states on the device."""
    counts, cuts = search.chain.counts, found.cuts
    saved = found.table.update_away[:, found.row] / found.shape.micro_batches
    return [(1 - away) * float((counts[cuts[s + 1]] - counts[cuts[s]]) @ saved) for s, away in enumerate(found.away)]


def _closed_form(found: Found, ways: list[Way], instance: Instance, relief: list[float]) -> float:
    """Return the closed form of a plan from the search; the ratio to its real step corrects the chain problem."""
    seconds = []
    for stage, (first, second, split) in enumerate(found.modes):
        layers = np.arange(found.cuts[stage], found.cuts[stage + 1])
        one, two = (ways.index((found.row, mode)) for mode in (first, second))
        seconds.append(instance.time[layers, np.where(layers < split, one, two)].sum() - relief[stage])
    send = instance.send[np.array(found.cuts[1:-1], dtype=int) - 1, ways.index((found.row, found.modes[0][0]))]
    slowest = max(*seconds, *send, 0.0)
    return float(sum(seconds) + send.sum() + (instance.micro_batches - 1) * slowest)


def _solved(instance: Instance, solver: str, time_limit: float | None, limit: float) -> tuple[Any, Any] | None:
    """Return cuts and strategies, by the exact search (below a limit) or by HiGHS."""
    if solver == "milp":
        from meshwright.search.refine.milp import solve_milp

        answer = solve_milp(instance, time_limit)
        return (answer.cuts, answer.strategies) if np.isfinite(answer.value) else None
    try:
        found = solve(instance, limit, _ENOUGH, _EFFORT)
    except TooMuch:
        return None
    return (found.cuts, found.strategies) if found else None


def with_all_choices(search: Search, found: Found) -> Found:
    """Return a plan with every choice of its stage size and micro-batch, not only those that may win alone."""
    every = search.choices_of(found.shape)
    row = np.array([found.row])
    if len(every) > _MOST_CHOICES:
        movable = np.flatnonzero(found.table.movable.any(axis=0))
        mine = found.table.take(row)
        mine = mine.fixed() if any(found.away) else mine.here()
        table = mine.beside(found.table.fixed()).beside(found.table.take(movable).here())
        return dataclasses.replace(found, table=table, row=0)
    own = found.table.choices.take(row)
    own = own if any(found.away) else dataclasses.replace(own, optimizer_away=0 * own.optimizer_away)
    table = prices(search.job, search.chain, joined([own, every]), search.modes, search.site).fixed()
    return dataclasses.replace(found, table=table, row=0)


def ways_of(search: Search, found: Found, most: int = _WAYS, *, fill: bool = False) -> list[Way]:
    """Return configurations that no other beats on a whole model, the winner's first; `fill` adds the next fastest."""
    table, every, room = found.table, search.chain.counts[-1], search.setting.room
    seconds = np.einsum("s,rsc->rc", every, _seconds(search, found))
    flight = max(in_flight(found.shape.schedule, found.shape.groups, found.shape.micro_batches, 0)[0])
    need = np.einsum("s,rsc->rc", every, room.loose * flight * table.kept) + np.einsum("s,sc->c", every, table.states)
    own = {(found.row, mode) for first, second, _ in found.modes for mode in (first, second)}
    order = sorted(np.ndindex(seconds.shape), key=lambda at: (float(seconds[at]), float(need[at])))
    front: list[Way] = []
    least = np.inf
    for mode, row in order:
        if need[mode, row] < least:
            least = float(need[mode, row])
            front.append((row, mode))
    if fill:
        step = max(1, -(-len(front) // most))
        chosen = list(dict.fromkeys([*sorted(own), *front[::step]]))
        chosen += [(row, mode) for mode, row in order if (row, mode) not in chosen]
        return chosen[: max(most, len(own) + 2)]
    points = [(float(need[mode, row]), float(seconds[mode, row])) for row, mode in front]
    budget = found.shape.groups * (room.memory - room.overhead)
    near = [front[i] for i in _around(points, budget)]
    kin = _kin(found)
    return list(dict.fromkeys([*sorted(own), *kin, *near]))[: max(most, len(own) + len(kin) + 2)]


def _around(points: list[tuple[float, float]], budget: float) -> list[int]:
    """Return points of (bytes, seconds) on the lower hull, those nearest to a budget of bytes first.

    The fastest mix of configurations that just fits uses the two points of the hull beside the budget.
    """
    best = hull([seconds for _, seconds in points], [size for size, _ in points])[::-1]  # fewest bytes first
    place = sum(points[i][0] <= budget for i in best)
    return sorted(best, key=lambda i: abs(best.index(i) - place + 0.5))


def _kin(found: Found) -> list[Way]:
    """Return the winner's grid with every other ZeRO level (or no offload), without recompute."""
    choices, row = found.table.choices, found.row
    same = (choices.zero_group == 0) & (choices.optimizer_away == 0) & (choices.parameters_away == 0)
    for part in ("tp", "sp", "ulysses", "ring", "dp", "ep", "etp", "order"):
        values = getattr(choices.grids, part)
        same &= values == values[row]
    others = np.flatnonzero(same & ((choices.zero != choices.zero[row]) | (choices.optimizer_away[row] > 0)))
    return [(int(other), 0) for other in others]


def _seconds(search: Search, found: Found) -> Array:
    """Return (mode, sort, choice): seconds of one micro-batch, with its part of the end of the step."""
    table = found.table
    end = table.end(search.constants.contention) / found.shape.micro_batches
    return table.forward + table.backward + end


def instance_of(search: Search, found: Found, ways: list[Way]) -> Instance:
    """Return the chain problem: seconds and bytes of every layer under every configuration."""
    table, chain, room, shape = found.table, search.chain, search.setting.room, found.shape
    rows, modes = (np.array([way[i] for way in ways]) for i in (0, 1))
    sort = chain.sort
    time = _seconds(search, found)[modes, :, rows].T[sort]
    whole = np.array([chain.pieces_in(first, last)[0] for first, last in chain.block.tolist()])
    passed = table.passed_on[:, rows][sort]
    send = np.zeros_like(passed)
    if shape.groups > 1:
        worst = max(
            (send_seconds(search.job.cluster, 1e9, s * shape.devices, (s + 1) * shape.devices, search.constants), s)
            for s in range(shape.groups - 1)
        )[1]
        for per_byte, fixed in search.setting.links(shape.devices, worst):
            send = np.maximum(send, 2 * (passed * per_byte + fixed))
    flight = [in_flight(shape.schedule, shape.groups, shape.micro_batches, g)[0][0] for g in range(shape.groups)]
    memory = room.memory - room.overhead - _buffers(search, found)
    return Instance(
        time, table.states[:, rows][sort], room.loose * table.kept[modes, :, rows].T[sort], np.array(flight),
        np.maximum(memory, 0.0), _relayouts(search, found, ways), send, shape.micro_batches,
        room.loose * table.moment[modes, :, rows].T[whole],
    )  # fmt: skip


def _buffers(search: Search, found: Found) -> Array:
    """Return (stage,): bytes of its buffers for inputs and for gradients of outputs, under the best plan's grid."""
    stages = found.shape.stages
    if not search.runtime.receive_buffers or stages == 1:
        return np.zeros(stages)
    each = search.setting.room.loose * found.shape.micro_batches * float(found.table.received[:, found.row].max())
    return each * (2.0 - (np.arange(stages) == 0) - (np.arange(stages) == stages - 1))


def _span(search: Search, found: Found, way: Way, layers: str, mode: Mode) -> Span:
    span = found.table.choices.span(way[0], layers)
    return replace(span, offload=replace(span.offload, activations=mode.offload))


def _relayouts(search: Search, found: Found, ways: list[Way]) -> Array:
    """Return the seconds of moving activations between configurations of different grids, forward and backward."""
    grids = [grid(_span(search, found, way, "all", Mode())) for way in ways]
    widest = found.table.received[:, [row for row, _ in ways]].max(axis=0)
    cost = [2 * relayout_seconds(search.site, float(moved), found.shape.devices) for moved in widest]
    return np.array([[0.0 if a == b else cost[j] for j, b in enumerate(grids)] for a in grids])


def _plan(search: Search, found: Found, ways: list[Way], cuts: Any, chosen: Any) -> Plan:
    """Return the document: consecutive layers of one configuration form a span."""
    model, shape = search.job.model, found.shape
    stages = []
    for s in range(shape.stages):
        spans = []
        for way, some in groupby(range(int(cuts[s]), int(cuts[s + 1])), key=lambda i: ways[int(chosen[i])]):
            layers = list(some)
            mode, where = search.modes[way[1]], range(layers[0], layers[-1] + 1)
            span = _span(search, found, way, span_name(model, where), mode)
            spans.append(replace(span, recompute=repeated(model, where, mode)))
        devices = device_text(list(range(s * shape.devices, (s + 1) * shape.devices)))
        stages.append(Stage(devices=devices, spans=tuple(spans)))
    pipeline = Pipeline(
        batch=search.job.global_batch, micro_batches=shape.micro_batches, stages=tuple(stages), schedule=shape.schedule
    )
    return Plan(job=search.job.written(), pipelines=(pipeline,))
