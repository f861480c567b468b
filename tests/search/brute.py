"""The whole space of a small job, plan by plan, priced by `estimate`: what the search is held against.

Nothing here comes from the search but the list of modes; grids, ZeRO levels, cuts, schedules and runs are enumerated
with plain loops over plan documents, and every document is held against the rules and priced like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations, product

from msgspec.structs import replace

import meshwright as mw
from meshwright.cost.estimate import estimate
from meshwright.errors import MeshwrightError
from meshwright.plans import Pipeline, Schedule, Span, Stage
from meshwright.plans.rules import check
from meshwright.plans.schedule import group_of_stage
from meshwright.plans.spans import device_text, span_name
from meshwright.plans.strategy import DEFAULT_ORDER, Offload
from meshwright.search.space.activation_modes import Mode
from meshwright.search.space.limits import Limits

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("zbv", 2), ("dualpipev", 2), ("interleaved", 2)]


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def grids(devices: int, batch: int) -> Iterator[dict[str, object]]:
    """dp x tp x ulysses x ring, with and without sequence parallelism, in every order."""
    for tp, ulysses, ring, dp in product(divisors(devices), repeat=4):
        if tp * ulysses * ring * dp != devices or batch % dp:
            continue
        for sp in (False, True) if tp > 1 else (False,):
            active = [a for a, d in zip(DEFAULT_ORDER, (tp, ulysses, ring, dp), strict=True) if d > 1]
            idle = [a for a in DEFAULT_ORDER if a not in active]
            for order in permutations(active):
                yield {"tp": tp, "sp": sp, "ulysses": ulysses, "ring": ring, "dp": dp, "order": (*order, *idle)}


def strategies(devices: int, batch: int, limits: Limits) -> Iterator[Span]:
    for grid in grids(devices, batch):
        if not all(limits.keeps(name, grid[name]) for name in ("tp", "ulysses", "ring", "dp")):
            continue
        for zero in (0, 1, 2, 3):
            for optimizer, parameters in ((0, 0), (1, 0), (1, 1)) if limits.allows("offload") else ((0, 0),):
                away = Offload(optimizer=float(optimizer), parameters=float(parameters))
                if limits.keeps("zero", zero):
                    yield Span(layers="all", zero=zero, offload=away, **grid)  # type: ignore[arg-type]


def runs(model: mw.Model, low: int, high: int) -> Iterator[int]:
    """Layers at which a second run may begin; the first stands for one run."""
    yield low
    for i in range(low + 1, high):
        if model.layers[i].block and model.layers[i].opens_block:
            yield i


def stage_ways(
    model: mw.Model, span: Span, ranges: list[tuple[int, int]], modes: list[Mode]
) -> Iterator[list[tuple[Span, ...]]]:
    """Spans of all stages of one device group, under every mode and every pair of modes."""

    def spans(low: int, high: int, middle: int, first: Mode, second: Mode) -> tuple[Span, ...]:
        found = []
        for start, end, mode in ((low, middle, first), (middle, high, second)):
            if end > start:
                repeated: object = mode.recompute
                if not isinstance(repeated, str):
                    have = frozenset().union(*(model.layers[i].op_names for i in range(start, end)))
                    repeated = tuple(sorted(have & set(repeated))) or "none"  # type: ignore[call-overload]
                away = replace(span.offload, activations=mode.offload)
                found.append(
                    replace(span, layers=span_name(model, range(start, end)), recompute=repeated, offload=away)
                )
        return tuple(found)

    for mode in modes:
        yield [spans(low, high, low, mode, mode) for low, high in ranges]
    for first, second in permutations(modes, 2):
        if len(ranges) > 1:
            yield [
                spans(*ranges[0], ranges[0][1], first, second),
                *(spans(*r, r[0], first, second) for r in ranges[1:]),
            ]
        else:
            for middle in runs(model, *ranges[0]):
                if middle > ranges[0][0]:
                    yield [spans(*ranges[0], middle, first, second)]


def best(job: mw.Job, modes: list[Mode], limits: Limits) -> tuple[float, int]:
    """Seconds of the fastest plan that fits (infinite if none does), and how many plans were priced."""
    found, priced = float("inf"), 0
    for plan in plans(job, modes, limits):
        try:
            check(plan, job)
        except MeshwrightError:
            continue
        answer = estimate(job, plan)
        priced += 1
        if answer.fits:
            found = min(found, answer.step_seconds)
    return found, priced


def plans(job: mw.Job, modes: list[Mode], limits: Limits) -> Iterator[mw.Plan]:
    """Every plan of the space that keeps the limits, and some that break a rule."""
    count = len(job.model.layers)
    for size, p in product(divisors(job.cluster.devices), range(1, job.cluster.devices + 1)):
        if p * size > job.cluster.devices or not limits.keeps("pp", p):
            continue
        for name, virtual in SCHEDULES if p > 1 else [("1f1b", 1)]:
            if p > 1 and not limits.keeps("schedule", name):
                continue
            schedule = Schedule(name=name, virtual=virtual)  # type: ignore[arg-type]
            for cuts in combinations(range(1, count), p * virtual - 1):
                for span in strategies(size, job.global_batch, limits):
                    yield from _with(job, modes, limits, schedule, (0, *cuts, count), span)


def _with(
    job: mw.Job, modes: list[Mode], limits: Limits, schedule: Schedule, cuts: tuple[int, ...], span: Span
) -> Iterator[mw.Plan]:
    """One strategy on one set of cuts: every micro-batch, every mode of every group."""
    stages, size = len(cuts) - 1, span.devices
    home = [group_of_stage(schedule, stages, s) for s in range(stages)]
    devices = [device_text(list(range(g * size, (g + 1) * size))) for g in home]
    ways = [
        list(stage_ways(job.model, span, [(cuts[s], cuts[s + 1]) for s in range(stages) if home[s] == g], modes))
        for g in range(stages // schedule.virtual)
    ]
    for samples in divisors(job.global_batch // span.dp):
        if not limits.keeps("micro_batch", samples):
            continue
        for chosen in product(*ways):
            spans = [iter(group) for group in chosen]
            made = tuple(Stage(devices=devices[s], spans=next(spans[home[s]])) for s in range(stages))
            count = job.global_batch // (samples * span.dp)
            pipeline = Pipeline(batch=job.global_batch, micro_batches=count, stages=made, schedule=schedule)
            yield mw.Plan(job=job.written(), pipelines=(pipeline,))
