"""Search every shape in the order of its bound, until no bound is below the best plan found.

1. Grids of equal stage size and micro-batch form a table with a bound (`candidate_tables.py`).
2. A table keeps the pipelines in which some grid may win (`pruning.py`).
3. Choices (with ZeRO levels and offloaded states) are priced. Bounds with the memory of all devices, with the bubble,
   and with the memory of each group drop nearly all of them (`lower_bounds.py`).
4. The rest is fitted and simulated, least bound first (`memory_fit.py`, `step_time.py`).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from meshwright.cost.constants import DEFAULT, Constants
from meshwright.cost.layers.placement import StagePlacement
from meshwright.cost.runtime import Runtime
from meshwright.plans import Job
from meshwright.plans.schedule import Schedule
from meshwright.search.bounds.layer_times import LayerTimes, timed
from meshwright.search.bounds.lower_bounds import least_seconds, plain_seconds, pooled_extra, shortest
from meshwright.search.bounds.memory_fit import Room, Settled
from meshwright.search.bounds.pipeline_shapes import Found, Setting, Shape, homes_of
from meshwright.search.bounds.prices import Chain, Priced, Prices, prices
from meshwright.search.bounds.pruning import (
    Screen,
    averaged,
    holdable,
    hopeful,
    least_away,
    least_end,
    possible,
    spare,
    updates,
    useful,
)
from meshwright.search.bounds.step_time import SPLIT
from meshwright.search.exact.candidate_tables import Frame, Table, framed, numbers, tables
from meshwright.search.exact.evaluate import best_of, may_win
from meshwright.search.exact.local_search import polished, started
from meshwright.search.space.activation_modes import Mode, modes, recomputes
from meshwright.search.space.candidates import Choices, bare, folded, joined, with_states
from meshwright.search.space.cuts import Cutter, Family, Known
from meshwright.search.space.grids import all_grids
from meshwright.search.space.limits import Limits
from meshwright.search.space.schedules import group_counts, schedules

Array = Any
Item = tuple[Shape, Array, Array]  # a pipeline, choices, and their bounds
_CHUNK = 96  # choices that are bounded with the memory of each group at once
_PROBED = 8  # tables whose best choices are tried first
_HEAD = 2  # per table
_MANY = 1500  # grids with micro-batches that a good plan leaves at most
_FIRST = 24  # choices of each pipeline that are tried before there is a plan
_POLISHED = 32  # stages of plans whose cuts are moved at once; those of longer ones only in the end
_NEAR = 1.02  # of the best plan's time: closer plans may win once their cuts are moved
_CLOSE = 1.02  # the same at the end, with a wider search of cuts
_DEEP = 4  # shapes whose best plan's cuts get the wider search
_TRIED = 8  # neighbours of their cuts that are simulated
_FEW = 8  # stages: their cuts are moved from more starts
_STARTS = 2  # cuts from which they are moved


@dataclass
class Search:
    """One search: statistics, the best plans so far, and the bound of everything left."""

    job: Job
    runtime: Runtime
    limits: Limits = field(default_factory=Limits)
    constants: Constants = DEFAULT
    deadline: float = float("inf")  # by time.monotonic()
    grace: float = 0.0  # seconds beyond the deadline to look for a first plan
    on_step: Callable[[float, float], None] | None = None  # called with (best, bound) now and then
    best: list[Found] = field(default_factory=list)  # best first
    by_shape: dict[Shape, Found] = field(default_factory=dict)  # the best of every simulated shape
    explored: int = 0  # choices x cuts x schedules that got a bound
    settled: int = 0  # of these, cuts that were fitted and simulated
    bound: float = 0.0  # lower bound on the seconds of any plan
    first_only: bool = False  # stop at the first plan that fits
    effort: float = float("inf")  # limit on bounds computed, with fifty for each cut that is fitted
    has_first: bool = False  # a plan exists already: even the first look keeps the deadline
    known_cuts: Known = field(default_factory=dict)  # shared by searches of one model under the same limits
    frame: Frame | None = None  # candidates, shared with the search of schedules that overlap experts
    ceiling: float = float("inf")  # seconds; slower plans are useless

    def __post_init__(self) -> None:
        job = self.job
        self.site = StagePlacement.of(job, tuple(range(job.cluster.devices)), 0, self.runtime, self.constants)
        self.chain = Chain.of(job.model)
        self.modes = modes(job, self.site, self.limits)
        self._cutter = Cutter(job.model, self.chain.sort, self.chain.counts, self.limits, self.known_cuts)
        here = self.runtime.on(self.site.device)
        self.setting = Setting(
            job, self.chain, here, self.constants, Room.of(job, self.runtime), self.site.gradient_bytes,
            self.limits.allows("mixed"), self.limits.allows("stagewise"),
            self.limits.allows("partial") and self.limits.allows("stagewise"),
        )  # fmt: skip
        self._names = self.limits.schedules()
        self._count = 0
        self._probing = False  # only pipelines over all devices, of the usual schedules

    @property
    def limit(self) -> float:
        """Seconds of the best plan so far, or the most that is useful."""
        return self.best[0].seconds if self.best else self.ceiling

    @property
    def late(self) -> bool:
        if (self.first_only and self.best) or self.explored + 50 * self.settled > self.effort:
            return True
        return self._overdue and (self.has_first or not self._probing)

    @property
    def _overdue(self) -> bool:
        return time.monotonic() > self.deadline + (0.0 if self.best else self.grace)

    def run(self) -> None:
        """Search the whole space; a schedule that changes the cost of layers has its own search."""
        apart = self._apart()
        waiting = self._tables()
        if apart:  # with experts its plans are mostly faster: they rule out most of the rest
            apart.best, apart.by_shape, apart.frame = [], {}, self.frame
            others = apart._tables()
            apart._probe(others)
            self.best = apart.best
        self._probe(waiting)
        if apart and not self.late:
            apart.best = self.best
            apart._search(others)
            self.best = apart.best
        self._search(waiting)
        if apart:  # each search proves its part of the space
            self.bound = min(self.bound, apart.bound)
            self.by_shape |= apart.by_shape
            self.explored += apart.explored
            self.settled += apart.settled

    def _apart(self) -> Search | None:
        """Return a search of DualPipeV, which overlaps the experts' all-to-alls: all prices differ."""
        hides = max(self.runtime.overlap_experts, self.constants.dual_pipe)
        mixture = any(layer.experts for layer in self.chain.sorts)
        if not mixture or hides == self.runtime.overlap_experts or "dualpipev" not in self._names:
            return None
        self._names = [name for name in self._names if name != "dualpipev"]
        other = replace(self, runtime=replace(self.runtime, overlap_experts=hides))
        other._names = ["dualpipev"]
        return other

    def _tables(self) -> list[Table]:
        if self.frame is None:
            self.frame = framed(self.job, self.chain, self.site, self.limits, recomputes(self.modes))
        found = tables(self.job, self.chain, self.site, self.limits, self.most_groups, self.frame)
        for table in found:
            self._cutter.weigh(table.size, table.micro_batches, table.seconds)
        self._told(found)
        return found

    def _probe(self, waiting: list[Table]) -> None:
        """Try the best choices of the most promising tables, bubble included, until a plan leaves few others.

        A good plan rules out most of the rest before pricing. This takes a fraction of a second, so any time limit
        allows it.
        """
        self._probing = True
        start, some = 0, _PROBED
        while start < len(waiting):
            self._open([table.head(_HEAD) for table in waiting[start : start + some] if table.bound < self.limit])
            left = sum(np.searchsorted(table.least, self.limit) for table in waiting)
            if (self.best and left < _MANY) or ((start or self.has_first) and self._overdue):
                break
            start, some = start + some, 2 * some
        self._probing = False

    def _search(self, waiting: list[Table]) -> None:
        """Open tables until none can hold a better plan."""
        some = _PROBED
        while waiting:
            self._told(waiting)
            some = len(waiting) if self.limit < float("inf") else 2 * some
            self._open([table for table in waiting[:some] if table.bound < self.limit])
            if self.late:
                return  # the bound stays that of the open tables
            waiting = waiting[some:]
        self._deepen()
        self.bound = self.limit

    def _deepen(self) -> None:
        """Try many more cuts for the best of the shapes."""
        near = [found for found in self.by_shape.values() if 1 < found.shape.stages <= _POLISHED]
        if self.best and self.best[0].shape.stages > _POLISHED and self.limits.allows("uneven"):
            self._keep(self._again(polished(self.setting, self.places, self.modes, self.best[0])))
        for found in sorted(near, key=lambda found: found.seconds)[:_DEEP]:
            if found.seconds >= _CLOSE * self.limit or not self.limits.allows("uneven") or self.late:
                continue
            known: dict[object, Settled] = {}
            starts = started(self.setting, self._cutter, self.modes, found, self.cuts(found.shape).cuts, known)
            for start in starts[: _STARTS if found.shape.stages > _FEW else 2 * _STARTS]:
                self._keep(self._again(polished(self.setting, self.places, self.modes, start, _TRIED, known)))

    def _told(self, waiting: list[Table]) -> None:
        self.bound = min([table.bound for table in waiting] + [self.limit])
        if self.on_step:
            self.on_step(self.limit, self.bound)

    @property
    def places(self) -> list[int]:
        """Layers before which the chain may be cut."""
        found: list[int] = self._cutter.places.tolist()
        return found

    @property
    def most_groups(self) -> int:
        """Most device groups of a pipeline."""
        most = len(self._cutter.places) + 1 if self.limits.allows("pp") else 1
        return min(most, int(self.limits.fixed.get("pp", most)))

    def _open(self, some: list[Table]) -> None:
        """Search all pipelines of some tables, in the order of their bounds."""
        some = [table for table in some if not self.late and any(self._shapes(table))]
        if not some:
            return
        full = self.folded(joined([t.choices.take(np.flatnonzero(t.least < self.limit)) for t in some]))
        full = full.take(np.flatnonzero(possible(self.setting, full, self.most_groups)))
        if not len(full):
            return
        bare_ = timed(self.job, self.chain, full, self.site)
        wanted = self._wanted(bare_, some)
        left = spare(self.setting, bare_, wanted, self.limit)
        chosen = np.flatnonzero(left > 0)
        everything, parents = with_states(full.take(chosen), self.job, self.limits)
        parents = chosen[parents]
        kept = holdable(self.setting, everything, self.most_groups)
        least = everything
        if self.setting.partial:
            least = replace(everything, optimizer_away=least_away(self.setting, everything, self.most_groups))
        kept = np.flatnonzero(kept & (updates(self.setting, self.site, least) < left[parents]))
        if not len(kept):
            return
        everything, parents = everything.take(kept), parents[kept]
        rough = self._priced(everything, self.modes[:1])
        kept = useful(self.setting, rough, parents)
        everything, parents, rough = everything.take(kept), parents[kept], rough.take(kept)
        screen = Screen(self.setting, rough)
        known = Priced(everything, self.chain, lambda part: self._priced(part, self.modes))
        items = []
        for shape, rows in wanted if not self.late else []:
            mask = np.zeros(len(full), dtype=bool)
            mask[rows] = True
            mine = np.flatnonzero(mask[parents])
            mine = mine[screen.least(shape, mine) < self.limit]
            columns = tuple(column[:, mine] for column in rough.columns)
            bound = averaged(self.setting, self._cutter, shape, screen.total(shape, mine), columns)
            near = np.flatnonzero(bound < self.limit)
            if len(near):
                items.append((shape, mine[near], bound[near]))
        for part in [items] if self.limit < float("inf") else _halves(items):
            self._settle(known, self._bounded(known, part))

    def folded(self, part: Choices) -> Choices:
        return folded(self.job, self.chain.sorts, part, self.site.fabric, self.limits)

    def _priced(self, choices: Choices, modes: list[Mode]) -> Prices:
        found = prices(self.job, self.chain, choices, modes, self.site)
        return found if self.setting.partial else found.fixed()

    def _wanted(self, bare_: LayerTimes, some: list[Table]) -> list[tuple[Shape, Array]]:
        """Return every pipeline of some tables with the grids that may win in it."""
        choices = bare_.choices
        screen = Screen(self.setting, bare_, least_end(self.setting, self.site, choices, self.most_groups))
        home = numbers(self.job, choices)
        found: list[tuple[Shape, Array]] = []
        for table in some:
            mine = np.flatnonzero(home == numbers(self.job, table.choices)[0])
            for shape in self._shapes(table) if len(mine) and not self.late else []:
                rows = mine[screen.least(shape, mine) < self.limit]
                if len(rows):
                    work = shape.micro_batches * screen.work[rows]
                    rows = hopeful(self.setting, self._cutter, shape, rows, bare_, work, self.limit)
                if len(rows):
                    found.append((shape, rows))
        return found

    def _shapes(self, table: Table) -> Iterator[Shape]:
        """Yield pipelines that would win if one choice were best in every respect, with free cuts."""
        setting, size, count = self.setting, table.size, table.micro_batches
        every = self.chain.counts[-1]
        work = count * float(every @ table.seconds)
        once = {True: float(every @ (table.forward + table.through)), False: work / count}  # split backward or not
        first = 1 if self._probing else None
        for groups in group_counts(self.job, self.limits, size, table.groups, all_devices=self._probing):
            if setting.total(Shape(groups, size, Schedule(), count), work / groups) >= self.limit:
                continue
            for schedule in islice(schedules(self._names, self.limits, groups, count, len(self.places) + 1), first):
                shape = Shape(groups, size, schedule, count)
                through = once[schedule.name in SPLIT]  # one micro-batch passes all layers, and comes back
                if setting.total(shape, max(work * shortest(shape, table.early), through)) < self.limit:
                    yield shape

    def _bounded(self, known: Priced, items: list[Item]) -> list[Any]:
        """Return a heap of pipelines with their choices, by bounds with pooled memory, bubble and update."""
        waiting: list[Any] = []
        items = [(shape, rows[least < self.limit], least[least < self.limit]) for shape, rows, least in items]
        if items:
            known.price_all(np.unique(np.concatenate([rows for _, rows, _ in items])))
        for shape, rows, least in items:
            if self.late or not len(rows):
                continue
            cuts = self.cuts(shape)
            self.explored += len(cuts) * len(rows)
            extra, after = pooled_extra(self.setting, shape, cuts, *known.lean_rows(rows))
            least = least + self.setting.longer(shape, extra.min(axis=0))
            some = np.flatnonzero(least < self.limit)
            if not len(some):
                continue
            plain = plain_seconds(self.setting, shape, cuts, known.lean(rows[some]), after[:, some])
            least = np.maximum(least[some], plain.min(axis=0))
            order = np.argsort(least, kind="stable")
            order = order[least[order] < self.limit]
            if len(order):
                heapq.heappush(waiting, (float(least[order[0]]), self._next(), shape, rows[some][order], least[order]))
        return waiting

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _settle(self, known: Priced, waiting: list[Any]) -> None:
        """Bound a few choices with the memory of each group, least bound first, and simulate what is left."""
        while waiting and not self.late:
            least, _, shape, rows, bounds = heapq.heappop(waiting)
            if least >= self.limit:
                return
            few = rows[:_CHUNK][bounds[:_CHUNK] < self.limit]
            if len(rows) > _CHUNK and bounds[_CHUNK] < self.limit:
                heapq.heappush(waiting, (float(bounds[_CHUNK]), self._next(), shape, rows[_CHUNK:], bounds[_CHUNK:]))
            cuts = self.cuts(shape)
            exact = least_seconds(self.setting, shape, cuts, known.lean(few), self.limit)
            near = exact < self.limit
            if near.any():
                columns, rows_ = np.flatnonzero(near.any(axis=0)), np.flatnonzero(near.any(axis=1))
                part = Family([cuts.cuts[int(q)] for q in rows_], self.chain.counts)
                self._simulate(shape, part, exact[np.ix_(rows_, columns)], known.take(few[columns]))

    def _simulate(self, shape: Shape, cuts: Family, bound: Array, table: Prices) -> None:
        """Fit and simulate all choices of a table, the cuts of least bound first."""
        near = _NEAR if shape.stages <= _POLISHED else 1.0
        if len(cuts) > 1:  # all at once, and most of them cannot win
            may = may_win(self.setting, shape, cuts, table, self.modes, near * self.limit)
            bound = np.where(may, bound, np.inf)
        for q in np.argsort(bound.min(axis=1), kind="stable"):
            rows = np.flatnonzero(bound[q] < self.limit)
            if len(rows) and not self.late:
                self.settled += 1
                some = table.take(rows)
                self._offer(best_of(self.setting, shape, cuts.cuts[q], some, self.modes, near * self.limit))

    def choices_of(self, shape: Shape) -> Choices:
        """Return every choice of a shape's stage size and micro-batch."""
        grids = all_grids(self.job, self.site.fabric, self.limits)
        samples = self.job.global_batch // shape.micro_batches
        rows = np.flatnonzero((grids.devices == shape.devices) & (samples % grids.dp == 0))
        if "micro_batch" in self.limits.fixed:
            rows = rows[samples // grids.dp[rows] == self.limits.fixed["micro_batch"]]
        return with_states(self.folded(bare(grids.take(rows), samples // grids.dp[rows])), self.job, self.limits)[0]

    def _offer(self, found: Found | None) -> None:
        """Keep a plan; if it is better than the best, move its cuts first."""
        short = found is not None and found.shape.stages <= _POLISHED and not self.first_only
        if found and short and found.seconds < self.limit and self.limits.allows("uneven"):
            found = self._again(polished(self.setting, self.places, self.modes, found))
        if found:
            self._keep(found)

    def _again(self, found: Found) -> Found:
        """Return the plan with another offloaded part of the optimizer states, if that is faster."""
        one = found.table.take(np.array([found.row]))
        if found.shape.groups == 1 or not one.movable.any():
            return found
        other = best_of(self.setting, found.shape, found.cuts, one, self.modes, found.seconds)
        return replace(other, table=found.table, row=found.row) if other else found

    def _keep(self, found: Found) -> None:
        if found.seconds < self.limit:
            self.best.insert(0, found)
        if found.shape not in self.by_shape or found.seconds < self.by_shape[found.shape].seconds:
            self.by_shape[found.shape] = found

    def cuts(self, shape: Shape) -> Family:
        """Return cuts of the chain into the stages of a shape."""
        return self._cutter.cuts(homes_of(shape), shape.devices, shape.micro_batches)


def _halves(items: list[Item]) -> tuple[list[Item], list[Item]]:
    """Return the choices of least bound, and the rest: a first plan rules most out before they are fully priced."""
    first: list[Item] = []
    rest: list[Item] = []
    for shape, rows, bound in items:
        order = np.argsort(bound, kind="stable")
        for part, some in ((first, order[:_FIRST]), (rest, order[_FIRST:])):
            if len(some):
                part.append((shape, rows[some], bound[some]))
    return first, rest
