"""The search: every shape in the order of its bound, until no bound is below the best plan found.

1. Every grid with every micro-batch gets a bound: its layers' time, nothing repeated, spread evenly over all devices.
2. Grids of equal stage size and micro-batch form a table; tables are opened in the order of their bounds.
3. A table's choices (with ZeRO levels and states on the host) are priced, those that cannot fit or cannot win dropped.
4. For every number of stages and every schedule, cuts of the chain get a bound, then a simulation.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.cost.constants import DEFAULT, Constants
from meshwright.cost.estimate import Estimate, estimate
from meshwright.cost.runtime import Runtime
from meshwright.cost.site import Site
from meshwright.plan import Job, Plan
from meshwright.plan.schedule import Schedule
from meshwright.search.build import plan_of
from meshwright.search.cuts import balanced, places
from meshwright.search.grids import Grids, all_grids, divisors, fold, foldings
from meshwright.search.limits import Limits
from meshwright.search.modes import Mode, modes
from meshwright.search.prices import Chain, Prices, prices
from meshwright.search.shapes import Found, Room, Setting, Shape, best_of, least_seconds, quick_seconds
from meshwright.search.ways import Choices, bare, with_states

Array = Any
_CHUNK = 48  # choices that are priced under every mode at once
_MOST_VIRTUAL = 8


@dataclass(frozen=True)
class Table:
    """Choices whose stages have the same number of devices and the same micro-batches."""

    size: int  # devices of a stage
    micro_batches: int
    groups: int  # the most that the cluster holds
    choices: Choices
    least: Array  # seconds below which none of them can be

    @property
    def bound(self) -> float:
        return float(self.least[0])

    @property
    def promise(self) -> float:
        """The bound with a bubble as 1F1B halves it: which tables to open first."""
        return self.bound * (1 + (self.groups - 1) / (2 * self.micro_batches))


@dataclass
class Search:
    """One search: what it looked at, the best plans so far, and the bound below which nothing is left."""

    job: Job
    runtime: Runtime
    limits: Limits = field(default_factory=Limits)
    constants: Constants = DEFAULT
    deadline: float = float("inf")
    on_step: Callable[[float, float], None] | None = None  # called with (best, bound) now and then
    best: list[tuple[float, Found]] = field(default_factory=list)
    explored: int = 0
    settled: int = 0
    bound: float = 0.0
    closest: tuple[float, Prices, int] | None = None
    modes: list[Mode] = field(default_factory=list)

    def __post_init__(self) -> None:
        job = self.job
        ranks = tuple(range(job.cluster.devices))
        self.site = Site.of(job, ranks, 0, self.runtime, self.constants)
        self.chain = Chain.of(job.model)
        self.modes = modes(job, self.site, self.limits)
        self.places = places(job.model, self.limits)
        self.setting = Setting(
            job, self.chain, self.runtime, self.constants, Room.of(job, self.runtime), self.site.gradient_bytes,
            self.limits.allows("mixed"),
        )  # fmt: skip
        self._count = 0
        self._cuts: dict[int, list[tuple[int, ...]]] = {}

    @property
    def limit(self) -> float:
        """Seconds of the best plan so far."""
        return self.best[0][0] if self.best else float("inf")

    def run(self) -> None:
        """Open tables until none can hold a better plan; those that look best, bubble included, come first."""
        waiting = self._tables()
        for i, table in enumerate(waiting):
            rest = min((t.bound for t in waiting[i:]), default=self.limit)
            self.bound = min(rest, self.limit)
            if time.monotonic() > self.deadline:
                return
            if table.bound < self.limit:
                self._open(table)
            if self.on_step:
                self.on_step(self.limit, self.bound)
        self.bound = self.limit

    def _tables(self) -> list[Table]:
        """Choices of equal stage size and micro-batch."""
        every = self._candidates()
        if not len(every):
            return []
        least = self._least(every)
        keys = every.grids.devices * (self.job.global_batch + 1) + every.micro_batch
        order = np.lexsort((least, keys))
        starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
        found = []
        for rows in np.split(order, starts[1:]):
            part = every.take(rows)
            size, micro = int(part.grids.devices[0]), int(part.micro_batch[0])
            groups = min(self.job.cluster.devices // size, self._most_groups())
            found.append(Table(size, self.job.global_batch // micro, groups, part, least[rows]))
        return sorted(found, key=lambda t: t.promise)

    def _candidates(self) -> Choices:
        """Every grid with every number of samples per replica."""
        grids = all_grids(self.job, self.site.fabric, self.limits)
        parts, samples = [], []
        for size in divisors(self.job.global_batch):
            rows = np.flatnonzero((self.job.global_batch // grids.dp) % size == 0)
            if not self.limits.keeps("micro_batch", size):
                continue
            if "micro_batches" in self.limits.fixed:
                count = self.job.global_batch // (grids.dp[rows] * size)
                rows = rows[count == self.limits.fixed["micro_batches"]]
            parts.append(rows)
            samples.append(np.full(len(rows), size, dtype=np.int64))
        rows = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        return bare(grids.take(rows), np.concatenate(samples) if samples else rows)

    def _least(self, choices: Choices) -> Array:
        """Seconds of a step if every device always worked: nothing repeated, no bubble, no gradients."""
        keys = np.stack([
            choices.grids.tp, choices.grids.sp, choices.grids.ulysses, choices.grids.ring, choices.samples,
            *(c for c in _meeting(choices.grids, self.site)),
        ], axis=1)  # fmt: skip
        _, first, back = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        unique = choices.take(first)
        seconds = np.zeros(len(first))
        counts = self.chain.counts[-1]
        experts = [i for i, layer in enumerate(self.chain.sorts) if layer.experts]
        table = prices_of_time(self.job, self.chain, unique, self.site, [i for i in range(len(counts)) if i not in experts])
        seconds += (counts[:, None] * table).sum(axis=0)
        if experts:
            seconds += self._least_experts(unique, experts)
        per_step = self.job.global_batch // choices.micro_batch * seconds[back.reshape(-1)]
        most = np.minimum(self.job.cluster.devices // choices.grids.devices, self._most_groups())
        return per_step / most + self.runtime.step_seconds

    def _least_experts(self, unique: Choices, experts: list[int]) -> Array:
        """Mixtures under the best of all foldings, wherever their devices are."""
        best = np.full(len(unique), np.inf)
        for ep, same in foldings(self.job, self.site.fabric, self.limits):
            etp = unique.grids.tp if same else np.ones_like(unique.grids.tp)
            g = unique.grids
            grids = Grids(g.tp, g.sp, g.ulysses, g.ring, g.dp, np.full(len(g), ep, dtype=np.int64), etp, g.order)
            table = prices_of_time(self.job, self.chain, bare(grids, unique.samples), self.site, experts)
            best = np.minimum(best, (self.chain.counts[-1][:, None] * table).sum(axis=0))
        return best

    def _most_groups(self) -> int:
        most = len(self.places) + 1 if self.limits.allows("pp") else 1
        return min(most, self.limits.fixed.get("pp", most))

    def _open(self, found: Table) -> None:
        """Look at all pipelines of one stage size and micro-batch, in the order of their bounds."""
        size, count = found.size, found.micro_batches
        full = self._with_experts(found.choices.take(np.flatnonzero(found.least < self.limit)))
        if not len(full):
            return
        everything = with_states(full, self.job, self.limits)
        rough = prices(self.job, self.chain, everything, [Mode(), Mode("full")], self.site)
        waiting: list[tuple[float, int, Shape, tuple[int, ...], Array, Array]] = []
        for groups in self._group_counts(size, found.groups):
            rows = self._hopeful(rough, groups, size, count)
            if len(rows):
                self._bounds(rough.take(rows), rows, groups, size, count, waiting)
        self._settle(everything, waiting)

    def _bounds(self, rough: Prices, rows: Array, groups: int, size: int, count: int, waiting: list[Any]) -> None:
        """Put every schedule and cut with its choices into the heap, by its bound."""
        for schedule in self._schedules(groups, count):
            shape = Shape(groups, size, schedule, count)
            cuts = self._balanced(shape.stages)
            if not cuts:
                continue
            bound = quick_seconds(self.setting, shape, cuts, rough)
            self.explored += bound.size
            for q, cut in enumerate(cuts):
                order = np.argsort(bound[q], kind="stable")
                order = order[bound[q][order] < self.limit]
                if len(order):
                    heapq.heappush(waiting, (float(bound[q][order[0]]), self._next(), shape, cut, rows[order], bound[q][order]))

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _settle(self, everything: Choices, waiting: list[Any]) -> None:
        """Least bound first: price a few choices under every mode, bound them with memory, simulate what is left."""
        known = _Priced(everything, lambda part: prices(self.job, self.chain, part, self.modes, self.site))
        while waiting and time.monotonic() < self.deadline:
            least, _, shape, cut, rows, bounds = heapq.heappop(waiting)
            if least >= self.limit:
                return
            few = rows[:_CHUNK][bounds[:_CHUNK] < self.limit]
            if len(rows) > _CHUNK and bounds[_CHUNK] < self.limit:
                rest = (float(bounds[_CHUNK]), self._next(), shape, cut, rows[_CHUNK:], bounds[_CHUNK:])
                heapq.heappush(waiting, rest)
            table = known.take(few)
            exact = least_seconds(self.setting, shape, cut, table, self.limit)
            near = np.flatnonzero(exact < self.limit)
            if len(near):
                self.settled += 1
                found = best_of(self.setting, shape, cut, table.take(near), self.modes, self.limit)
                if found:
                    self.best.insert(0, (found.seconds, found))

    def _with_experts(self, part: Choices) -> Choices:
        from meshwright.search.ways import joined

        if not any(layer.experts for layer in self.chain.sorts):
            return part
        found = []
        for ep, same in foldings(self.job, self.site.fabric, self.limits):
            grids, rows = fold(self.job, part.grids, ep, self.site.fabric, self.limits, same=same)
            if len(rows):
                found.append(bare(grids, part.samples[rows]))
        return joined(found) if found else part.take(np.zeros(0, dtype=np.int64))

    def _group_counts(self, size: int, most: int) -> list[int]:
        fixed = self.limits.fixed.get("pp")
        counts = [fixed] if fixed else range(most, 0, -1)
        wanted = self.limits.fixed.get("devices", 0 if self.limits.allows("idle") else self.job.cluster.devices)
        return [p for p in counts if p <= most and (not wanted or p * size == wanted)]

    def _even(self, table: Prices, groups: int, size: int, count: int) -> Array:
        """A bound: all layers, nothing repeated, spread evenly over the groups."""
        totals = {
            name: np.einsum("s,sc->c", self.chain.counts[-1], value)
            for name, value in (
                ("time", table.forward[0] + table.backward[0]), ("reduce", table.reduce), ("gather", table.gather),
                ("update", table.update),
            )
        }  # fmt: skip
        slow = self.constants.contention
        work = count * totals["time"] + slow * (totals["reduce"] + totals["gather"]) + totals["update"]
        shape = Shape(groups, size, Schedule(), count)
        return self.setting.total(shape, work / groups)

    def _hopeful(self, rough: Prices, groups: int, size: int, count: int) -> Array:
        """Choices that may win and may fit, best bound first."""
        bound = self._even(rough, groups, size, count)
        room, counts = self.setting.room, self.chain.counts[-1]
        kept = np.einsum("s,sc->c", counts, np.minimum(rough.kept[0], rough.kept[1]))
        if self.limits.allows("offload"):
            kept = kept * 0.0
        states = np.einsum("s,sc->c", counts, rough.states)
        moment = rough.moment.min(axis=(0, 1))
        need = (states + room.loose * kept) / groups + room.overhead + room.loose * moment
        rows = np.flatnonzero((bound < self.limit) & (need <= room.memory))
        return rows[np.argsort(bound[rows], kind="stable")]

    def _schedules(self, groups: int, count: int) -> Iterator[Schedule]:
        names = self.limits.schedules()
        virtual = self.limits.fixed.get("virtual")
        if groups == 1:
            if virtual in (None, 1):
                yield Schedule(name="1f1b" if "1f1b" in names or not names else "gpipe")
            return
        for name in ("zbv", "dualpipev"):
            if name in names and virtual in (None, 2) and (name == "zbv" or count >= 2 * groups):
                yield Schedule(name=name, virtual=2)  # type: ignore[arg-type]
        for name in ("zero-bubble", "1f1b", "gpipe"):
            if name in names and virtual in (None, 1):
                yield Schedule(name=name)  # type: ignore[arg-type]
        if "interleaved" in names and count % max(1, count // groups) == 0:
            for v in range(2, _MOST_VIRTUAL + 1):
                if virtual in (None, v) and v * groups <= len(self.places) + 1:
                    yield Schedule(name="interleaved", virtual=v)

    def _balanced(self, stages: int) -> list[tuple[int, ...]]:
        if stages not in self._cuts:
            one = Grids(*(np.ones(1, dtype=np.int64) for _ in range(7)), np.zeros(1, dtype=np.int64))
            seconds = prices_of_time(self.job, self.chain, bare(one, np.ones(1, dtype=np.int64)), self.site, range(len(self.chain.sorts)))
            weights = seconds[self.chain.sort, 0]
            self._cuts[stages] = balanced(weights, stages, self.places, self.job.model)
        return self._cuts[stages]


class _Priced:
    """Choices priced under every mode when they are first asked for."""

    def __init__(self, everything: Choices, price: Callable[[Choices], Prices]) -> None:
        self.everything, self.price = everything, price
        self.place: dict[int, int] = {}
        self.table: Prices | None = None

    def take(self, rows: Array) -> Prices:
        new = [int(row) for row in rows if int(row) not in self.place]
        if new:
            more = self.price(self.everything.take(np.array(new)))
            for row in new:
                self.place[row] = len(self.place)
            self.table = more if self.table is None else self.table.beside(more)
        assert self.table is not None
        return self.table.take(np.array([self.place[int(row)] for row in rows]))


def _meeting(grids: Grids, site: Site) -> Iterator[Array]:
    """How many members of each axis the tiers join: what decides the time of its collectives."""
    strides = grids.strides()
    for axis in ("tp", "ulysses", "ring"):
        for tier in site.fabric.tiers[:-1]:
            yield np.clip(tier.span // strides[axis], 1, getattr(grids, axis))  # type: ignore[index]


def prices_of_time(job: Job, chain: Chain, choices: Choices, site: Site, sorts: Any) -> Array:
    """(sort, choice): seconds of both passes with nothing repeated; zero for sorts that are not asked for."""
    from meshwright.cost.layer import layer_time
    from meshwright.cost.passes import PASSES, layer_passes
    from meshwright.search.ways import priced

    ways = priced(choices, job, site.fabric, fused_attention=site.runtime.attention != "unfused")
    found = np.zeros((len(chain.sorts), len(choices)))
    for i in sorts:
        layer = chain.sorts[i]
        time_ = layer_time(layer, ways.cut, site.chip, site.fabric, site.runtime, ways.place)
        passes = layer_passes(layer, time_, ways, "none", site)
        found[i] = passes.total(PASSES[0]) + passes.total(PASSES[1])
    return found


def plan_found(search: Search) -> tuple[Plan, Estimate]:
    """The best plan as a document, and its estimate."""
    plan = plan_of(search.job, search.best[0][1], search.modes)
    return plan, estimate(search.job, plan, search.runtime, search.constants)
