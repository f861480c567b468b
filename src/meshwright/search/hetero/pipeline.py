"""Build one pipeline across kinds of devices: the stages of each kind, and their number of layers.

Every kind brings a number of stages with a grid, a ZeRO level and modes of its own. Faster kinds, and those with more
memory, get more layers. Combinations of stage sizes, micro-batches and orders of the kinds are tried in the order of a
bound. Cuts are balanced by each stage's time with the modes that fit, then moved while that helps. UniAP's closed form
(all stages and m - 1 times the slowest) estimates the step. The best plans are priced exactly.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, permutations, product
from typing import Any

import numpy as np

from meshwright.cost.estimate import estimate
from meshwright.plans import Job, Pipeline, Plan, Stage, in_flight
from meshwright.plans.schedule import Schedule, ScheduleName
from meshwright.plans.spans import device_text
from meshwright.search.bounds.memory_fit import Load, Settled, extras, settle
from meshwright.search.bounds.pipeline_shapes import Cuts
from meshwright.search.bounds.prices import Prices, prices
from meshwright.search.bounds.pruning import holdable
from meshwright.search.exact.candidate_tables import Table
from meshwright.search.exact.local_search import neighbours
from meshwright.search.exact.plan_builder import stage_spans
from meshwright.search.exact.solve import Search
from meshwright.search.space.candidates import Choices, with_states

Array = Any
_LOOKED_AT = 24  # combinations with balanced cuts
_GRIDS = 6  # of each kind and stage size, the fastest
_CHOICES = 8  # of each kind, grids with ZeRO levels and offload
_NEAR = 1.1  # of the best plan's time: below it cuts are moved
_HOPELESS = 1.15
_ROUNDS = 5  # of balancing
_MOVES = 24  # of single cuts
_SCHEDULES: tuple[ScheduleName, ...] = ("zero-bubble", "1f1b")


@dataclass(frozen=True)
class Kind:
    """Devices of one kind, with a search that prices stages on them."""

    index: int  # of the cluster's groups
    first: int  # number of its first device
    search: Search
    tables: dict[tuple[int, int], Table]  # by stage size and micro-batches


@dataclass(frozen=True)
class Line:
    """Kinds in the order of the pipeline, with the devices of one stage of each, and the micro-batches."""

    kinds: tuple[Kind, ...]
    sizes: tuple[int, ...]
    micro_batches: int

    @property
    def stages(self) -> list[int]:
        """Position in `kinds` of every stage's kind."""
        counts = [kind.search.job.cluster.devices // size for kind, size in zip(self.kinds, self.sizes, strict=True)]
        return [i for i, count in enumerate(counts) for _ in range(count)]


def lines(kinds: Sequence[Kind], limit: float) -> list[tuple[float, Line]]:
    """Return the most promising combinations that may beat `limit` seconds, with bounds, least first."""
    found: list[tuple[float, Line]] = []
    limits = kinds[0].search.limits
    if not all(map(limits.allows, ("pp", "uneven", "stagewise"))) or not limits.keeps("virtual", 1):
        return found
    stages = range(2, len(kinds[0].search.places) + 2)
    if "pp" in limits.fixed:
        stages = range(limits.fixed["pp"], limits.fixed["pp"] + 1)
    for count in sorted({m for kind in kinds for _, m in kind.tables}):
        pace = _Pace.of(kinds, count)
        for some in _subsets(kinds) if limits.allows("idle") else [list(kinds)]:
            for chosen in product(*(pace.sizes(kind) for kind in some)):
                if sum(pace.stages(k, size) for k, size in zip(some, chosen, strict=True)) not in stages:
                    continue
                for order in permutations(zip(some, chosen, strict=True)):
                    if (bound := pace.bound(order)) < limit:
                        line = Line(tuple(kind for kind, _ in order), tuple(size for _, size in order), count)
                        found.append((bound, line))
        found = heapq.nsmallest(_LOOKED_AT, found, key=lambda item: item[0])
    return found


def _subsets(kinds: Sequence[Kind]) -> Iterator[list[Kind]]:
    for used in product((True, False), repeat=len(kinds)):
        if sum(used) > 1:
            yield [kind for kind, use in zip(kinds, used, strict=True) if use]


@dataclass(frozen=True)
class _Pace:
    """Speed of stages of each kind and size for some number of micro-batches, relative to a reference."""

    micro_batches: int
    work: float  # seconds of one micro-batch on the reference
    early: float  # the least part of a layer's time that its forward pass takes
    overhead: float
    speed: dict[tuple[int, int], float]  # by kind and size: a stage's share of the reference's work per second

    @staticmethod
    def of(kinds: Sequence[Kind], count: int) -> _Pace:
        some = {(k.index, size): t for k in kinds for (size, m), t in k.tables.items() if m == count}
        some = {key: t for key, t in some.items() if _devices(kinds, key[0]) % key[1] == 0}
        search = kinds[0].search
        every = search.chain.counts[-1]
        reference = next(iter(some.values())).seconds if some else np.ones(len(every))
        speed = {key: float((reference / np.maximum(t.seconds, 1e-30))[every > 0].max()) for key, t in some.items()}
        early = min((t.early for t in some.values()), default=1.0)
        return _Pace(count, float(every @ reference), early, search.runtime.step_seconds, speed)

    def sizes(self, kind: Kind) -> list[int]:
        return [size for index, size in self.speed if index == kind.index]

    def stages(self, kind: Kind, size: int) -> int:
        return kind.search.job.cluster.devices // size

    def bound(self, order: Sequence[tuple[Kind, int]]) -> float:
        """Return a lower bound in seconds over all cuts, with kinds in this order.

        As in `bounds.shortest`, but a stage of kind k does v_k of the reference's work: V >= m W / sum of v (1 -
        early/m)^s over the stages s.
        """
        rest, reach = 1 - self.early / self.micro_batches, 0.0
        ahead = 1.0
        for kind, size in order:
            behind = ahead * rest ** self.stages(kind, size)
            steps = (ahead - behind) / (1 - rest)
            reach += self.speed[kind.index, size] * steps
            ahead = behind
        return self.micro_batches * self.work / reach + self.overhead


def _devices(kinds: Sequence[Kind], index: int) -> int:
    return next(kind.search.job.cluster.devices for kind in kinds if kind.index == index)


def _table(kind: Kind, size: int, line: Line) -> Table:
    return kind.tables[size, line.micro_batches]


def best_across(
    job: Job, waiting: Sequence[tuple[float, Line]], limit: float, late: Callable[[], bool]
) -> tuple[float, Plan] | None:
    """Return the fastest plan found below `limit` seconds, with its seconds."""
    best: tuple[float, Plan] | None = None
    known: dict[tuple[int, ...], Prices | None] = {}
    for bound, line in waiting:
        search = line.kinds[0].search
        for name in (name for name in _SCHEDULES if name in search.limits.schedules()):
            least = best[0] if best else limit
            if bound >= least or (late() and least < np.inf):
                break
            plan = _Balance(job, line, Schedule(name=name), known).plan(_NEAR * least)
            if plan is None:
                continue
            priced = estimate(job, plan, search.runtime, search.constants)
            if priced.fits and priced.step_seconds < least:
                best = (priced.step_seconds, plan)
    return best


@dataclass
class _Balance:
    """Balancer of the cuts of one pipeline under one schedule."""

    job: Job
    line: Line
    schedule: Schedule
    known: dict[tuple[int, ...], Prices | None]  # choices of a kind by stage size, micro-batches and stages
    _settled: dict[tuple[int, int, int], Settled] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.home = self.line.stages  # per stage
        self.contention = self.line.kinds[0].search.constants.contention
        self.priced = []
        for i, kind in enumerate(self.line.kinds):
            key = (kind.index, self.line.sizes[i], self.line.micro_batches, len(self.home))
            if key not in self.known:
                self.known[key] = self._priced(i)
            self.priced.append(self.known[key])

    def _priced(self, which: int) -> Prices | None:
        """Return the fastest grids of a kind, with every ZeRO level whose states its stages can hold."""
        kind, search = self.line.kinds[which], self.line.kinds[which].search
        head = _varied(_table(kind, self.line.sizes[which], self.line).choices)
        every, _ = with_states(search.folded(head), self.job, search.limits)
        every = every.take(np.flatnonzero(holdable(search.setting, every, len(self.home), alone=False)))
        if not len(every):
            return None
        rough = prices(search.job, search.chain, every, search.modes[:1], search.site).fixed()
        every = every.take(_front(rough, rough.end(self.contention) / self.line.micro_batches, search.chain.counts[-1]))
        return prices(search.job, search.chain, every, search.modes, search.site).fixed()

    def plan(self, limit: float) -> Plan | None:
        """Return a plan with balanced and moved cuts, or None if no cuts fit or come near `limit` seconds."""
        if any(table is None for table in self.priced):
            return None
        search = self.line.kinds[0].search
        places = [0, *search.places, len(search.chain.sort)]
        weight, plain = [1.0] * len(self.home), self._plain()
        best: tuple[float, Cuts] | None = None
        for _ in range(_ROUNDS):
            cuts = _balanced(plain, self.home, weight, places)
            if cuts is None or self._at_least(plain, cuts) > _HOPELESS * limit:
                return None
            value, times = self._value(cuts)
            if best is None or value < best[0]:
                best = (value, cuts)
            if _HOPELESS * limit < value < np.inf:
                return None
            for s, seconds in enumerate(times):
                alone = plain[self.home[s]][cuts[s + 1]] - plain[self.home[s]][cuts[s]]
                weight[s] = min(seconds / max(alone, 1e-30), 1.5 * weight[s])
        assert best is not None
        if best[0] >= limit or not np.isfinite(best[0]):
            return None
        for _ in range(_MOVES):
            moved = min((self._value(c)[0], c) for c in neighbours(best[1], places[1:-1]))
            if moved[0] >= best[0]:
                break
            best = moved
        return self._written(best[1])

    def _plain(self) -> list[list[float]]:
        """Return per kind the seconds of the layers before each place, without recompute, on its fastest grid."""
        found = []
        for kind, table in zip(self.line.kinds, self.priced, strict=True):
            assert table is not None
            end = table.end(self.contention) / self.line.micro_batches
            each = (end + table.forward[0] + table.backward[0])[kind.search.chain.sort]
            found.append([0.0, *accumulate(each[:, int(np.argmin(each.sum(axis=0)))].tolist())])
        return found

    def _value(self, cuts: Cuts) -> tuple[float, list[float]]:
        """Return the seconds of the step and of each stage, under the best choice for all stages of a kind."""
        each = [self._seconds(s, cuts) for s in range(len(self.home))]
        rows = self._rows(each)
        times, ends = ([float(pair[i][rows[k]]) for pair, k in zip(each, self.home, strict=True)] for i in (0, 1))
        return sum(times) + self._more(max(times)) + max(ends), times

    def _at_least(self, plain: list[list[float]], cuts: Cuts) -> float:
        """Return the seconds of the step without recompute."""
        times = [plain[k][b] - plain[k][a] for k, (a, b) in zip(self.home, pairwise(cuts), strict=True)]
        return sum(times) + float(self._more(max(times)))

    def _more(self, slowest: Array) -> Array:
        """Return the seconds of all micro-batches but one."""
        return (self.line.micro_batches - 1) * slowest if self.line.micro_batches > 1 else 0.0

    def _rows(self, each: list[tuple[Array, Array]]) -> list[int]:
        """Return for every kind the choice under which its stages are fastest."""
        kinds = range(len(self.line.kinds))
        slowest, total, end = ([np.zeros(1)] * len(kinds) for _ in range(3))
        for (seconds, after), i in zip(each, self.home, strict=True):
            slowest[i], total[i] = np.maximum(slowest[i], seconds), total[i] + seconds
            end[i] = np.maximum(end[i], after)
        return [int(np.argmin(self._more(slowest[i]) + total[i] + end[i])) for i in kinds]

    def _seconds(self, stage: int, cuts: Cuts) -> tuple[Array, Array]:
        """Return (choice,): one micro-batch of a stage, infinite where it does not fit; and the end of the step."""
        found = self._stage(stage, cuts)
        before = self._ends[self.home[stage]]
        end = before[cuts[stage + 1]] - before[cuts[stage]]
        return np.where(found.fits, found.forward[:, 0] + found.backward[:, 0], np.inf), end

    @cached_property
    def _ends(self) -> list[Array]:
        """For every kind (place, choice): share of the layers before a place in the end of the step."""
        counts = [kind.search.chain.counts for kind in self.line.kinds]
        return [c @ t.end(self.contention) for c, t in zip(counts, self.priced, strict=True) if t is not None]

    def _stage(self, stage: int, cuts: Cuts) -> Settled:
        key = (stage, cuts[stage], cuts[stage + 1])
        if key not in self._settled:
            kind, table = self.line.kinds[self.home[stage]], self.priced[self.home[stage]]
            assert table is not None
            setting, held = kind.search.setting, [(cuts[stage], cuts[stage + 1])]
            more = extras(setting.chain, table, setting.chain.elsewhere(held), setting.gradient_bytes)
            mixes = in_flight(self.schedule, len(self.home), self.line.micro_batches, stage)
            buffers = np.zeros(len(table.choices))
            if setting.runtime.receive_buffers:
                sort = setting.chain.sort
                both = table.received[sort[held[0][0]]] + table.passed_on[sort[held[0][1] - 1]]
                buffers = self.line.micro_batches * both
            loads, count = [Load(held, mixes, more, buffers)], self.line.micro_batches
            known = settle(setting.chain, table, kind.search.modes, loads, setting.room, count, mixed=setting.mixed)
            self._settled[key] = known[0]
        return self._settled[key]

    def _written(self, cuts: Cuts) -> Plan:
        rows = self._rows([self._seconds(s, cuts) for s in range(len(self.home))])
        used = [0] * len(self.line.kinds)
        stages = []
        for s, i in enumerate(self.home):
            kind, table, size = self.line.kinds[i], self.priced[i], self.line.sizes[i]
            assert table is not None
            first = kind.first + used[i]
            used[i] += size
            found = self._stage(s, cuts)
            chosen = (int(found.first[rows[i]]), int(found.second[rows[i]]), int(found.split[rows[i]]))
            where = (cuts[s], cuts[s + 1])
            away = float(table.choices.optimizer_away[rows[i]])
            spans = stage_spans(self.job.model, table.choices, rows[i], kind.search.modes, chosen, where, away)
            stages.append(Stage(devices=device_text(list(range(first, first + size))), spans=spans))
        pipeline = Pipeline(
            batch=self.job.global_batch, micro_batches=self.line.micro_batches, stages=tuple(stages),
            schedule=self.schedule,
        )  # fmt: skip
        return Plan(job=self.job.written(), pipelines=(pipeline,))


def _varied(choices: Choices) -> Choices:
    """Return the fastest grids, and the fastest for each number of pieces of a sample: long ones need many."""
    g = choices.grids
    _, first = np.unique(g.tp * g.ulysses * g.ring, return_index=True)
    return choices.take(np.unique([*range(min(_GRIDS, len(choices))), *first]))


def _front(rough: Prices, end: Array, every: Array) -> Array:
    """Return some choices that no other beats in seconds, states and activations together, the fastest first."""
    traits = np.stack(
        [every @ (rough.forward[0] + rough.backward[0] + end), every @ rough.states, every @ rough.kept[0]]
    )
    kept: list[int] = []
    for row in np.lexsort(traits[::-1]):
        if len(kept) < _CHOICES and not any((traits[:, other] <= traits[:, row]).all() for other in kept):
            kept.append(int(row))
    return np.array(kept)


def _balanced(reached: list[list[float]], home: list[int], weight: list[float], places: list[int]) -> Cuts | None:
    """Return cuts with the least longest stage: each is filled up to it, by its kind's time and weight."""
    if len(places) - 1 < len(home):
        return None
    longest = max(w * reached[i][-1] for w, i in zip(weight, home, strict=True))
    low, high, best = 0.0, longest, None
    for _ in range(40):
        middle = (low + high) / 2
        cuts = _filled(reached, home, weight, places, middle)
        if cuts:
            high, best = middle, cuts
        else:
            low = middle
    return best


def _filled(
    reached: list[list[float]], home: list[int], weight: list[float], places: list[int], most: float
) -> Cuts | None:
    at, cuts = 0, [0]
    for s, i in enumerate(home):
        last = len(places) - 1 - (len(home) - 1 - s)  # leave a place for each stage that follows
        here, end = reached[i][places[at]], at + 1
        while end < last and weight[s] * (reached[i][places[end + 1]] - here) <= most:
            end += 1
        if weight[s] * (reached[i][places[end]] - here) > most:
            return None
        at = end
        cuts.append(places[at])
    return tuple(cuts) if at == len(places) - 1 else None
