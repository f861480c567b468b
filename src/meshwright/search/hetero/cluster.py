"""Search on clusters of different devices: every group of equal nodes gets its own plan and share of the batch.

Each share of each group is a search on that group alone. Every group therefore has its own stages, tensor and context
parallelism, recompute and offload. Shares are counted in equal parts of the batch. Combinations are tried in the order
of their bounds, until none can be faster than the best plan found.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from meshwright.clusters import Cluster
from meshwright.cost.constants import DEFAULT, Constants
from meshwright.cost.estimate import estimate
from meshwright.cost.runtime import Runtime
from meshwright.plans import Job, Pipeline, Plan
from meshwright.search.exact.candidate_tables import framed, least_per_sample, tables
from meshwright.search.exact.plan_builder import plan_of
from meshwright.search.exact.solve import Search
from meshwright.search.hetero.pipeline import Kind, best_across, lines
from meshwright.search.space.activation_modes import recomputes
from meshwright.search.space.cuts import Known
from meshwright.search.space.limits import Limits

_PARTS = 16  # the batch is shared in so many parts, or fewer if it does not divide
_FINE = 64  # parts of the last step
Shares = tuple[int, ...]  # samples of each group


def parts_of(batch: int, most: int) -> int:
    """Return the number of equal parts of a batch, `most` or fewer.

    >>> parts_of(96, 64)
    48
    """
    return next(n for n in range(min(most, batch), 0, -1) if batch % n == 0)


@dataclass
class MixedSearch:
    """Search over shares; `best` holds (seconds, plan), fastest first."""

    job: Job
    runtime: Runtime
    limits: Limits = field(default_factory=Limits)
    constants: Constants = DEFAULT
    deadline: float = float("inf")
    on_step: Callable[[float, float], None] | None = None
    best: list[tuple[float, Plan]] = field(default_factory=list)
    bound: float = 0.0
    explored: int = 0
    settled: int = 0
    finished: bool = False
    _known: dict[tuple[int, int], Search] = field(default_factory=dict)
    _cuts: Known = field(default_factory=dict)
    _shared: Shares = ()  # of the best plan
    _per_sample: dict[int, float] = field(default_factory=dict)

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    @property
    def limit(self) -> float:
        return self.best[0][0] if self.best else float("inf")

    def run(self) -> None:
        """Try combinations of shares, least bound first; a search on one group makes a bound exact."""
        for _ in range(2):  # a good plan rules out most of the others
            self._proportional(self._speed(), _PARTS)
        waiting = [(self._bound(shares), shares) for shares in self._shares()]
        heapq.heapify(waiting)
        while waiting:
            least, shares = heapq.heappop(waiting)
            if (now := self._bound(shares)) > least:  # the bound has risen since it was put there
                heapq.heappush(waiting, (now, shares))
                continue
            self.bound = min(least, self.limit)
            if self.on_step:
                self.on_step(self.limit, self.bound)
            if least >= self.limit:
                break
            if self.late and self.best:
                return
            unknown = [i for i, share in enumerate(shares) if share and (i, share) not in self._known]
            if unknown:
                # The slowest group decides; once it is known, the combination may be out.
                slowest = max(unknown, key=lambda i: self._least(i, shares[i]))
                self._search(slowest, shares[slowest])
                heapq.heappush(waiting, (self._bound(shares), shares))
            else:
                self._price(shares)
        if self._shared and not self.late:
            self._proportional(self._speed(), _FINE)
        self.bound = self.limit
        self._across()

    def _proportional(self, speed: list[float], most_parts: int) -> None:
        """Try shares in proportion to the estimated speed of the groups, in at most `most_parts` of the batch."""
        batch = self.job.global_batch
        unit = batch // parts_of(batch, most_parts)
        shares = [round(batch * v / sum(speed) / unit) * unit for v in speed]
        shares[int(np.argmax(speed))] += batch - sum(shares)
        if tuple(shares) == self._shared or min(shares) < 0 or not self._usable(tuple(shares)):
            return
        for i, share in enumerate(shares):
            if share and (i, share) not in self._known:
                self._search(i, share)
        self._price(tuple(shares))

    def _speed(self) -> list[float]:
        """Return samples per second of each group with its part of the best shares, or by its bound."""
        if not self._shared:
            return [1 / self._least(i, 1) for i in range(len(self.job.cluster.groups))]
        return [s / self._known[i, s].limit if s else 0.0 for i, s in enumerate(self._shared)]

    def _across(self) -> None:
        """Search pipelines across kinds: the only fit if no kind can hold the model, and sometimes faster.

        They are outside the space that the search proves. Their own bound is loose, and counts if nothing else fits.
        """
        first = self.job.cluster.first_rank
        whole = [self._whole(i) for i in range(len(self.job.cluster.groups))]
        kinds = []
        for i, s in enumerate(whole):
            frame = framed(s.job, s.chain, s.site, self.limits, recomputes(s.modes))
            every = tables(s.job, s.chain, s.site, self.limits, s.most_groups, frame)
            kinds.append(Kind(i, first(i), s, {(t.size, t.micro_batches): t for t in every}))
        waiting = lines(kinds, self.limit)
        self.finished = bool(self.best)
        if not self.best:
            self.bound = min((bound for bound, _ in waiting), default=self.bound)
        if better := best_across(self.job, waiting, self.limit, lambda: self.late):
            self.best.insert(0, better)

    def _shares(self) -> Iterator[Shares]:
        """Yield divisions of the batch over groups; a group may stay idle."""
        batch = self.job.global_batch
        parts = parts_of(batch, _PARTS)
        for counts in product(range(parts + 1), repeat=len(self.job.cluster.groups)):
            if sum(counts) == parts and self._usable(counts):
                yield tuple(count * batch // parts for count in counts)

    def _usable(self, shares: Shares) -> bool:
        return self.limits.allows("idle") or all(shares)

    def _alone(self, group: int, share: int) -> Job:
        one = self.job.cluster.groups[group]
        name = f"{one.nodes}x{one.devices_per_node}x{one.device.name}"
        return replace(self.job, cluster=Cluster(name, (one,)), global_batch=share)

    def _least(self, group: int, share: int) -> float:
        """Return a lower bound for a group with its share: proved by its search, or from its fastest layers."""
        if (group, share) in self._known:
            return self._known[group, share].bound
        if group not in self._per_sample:
            whole = self._whole(group)
            device_seconds = least_per_sample(whole.job, whole.chain, whole.site, self.limits)
            self._per_sample[group] = device_seconds / whole.job.cluster.devices
        return share * self._per_sample[group]

    def _whole(self, group: int) -> Search:
        """Return a search of one group with the whole batch, not yet run."""
        return Search(self._alone(group, self.job.global_batch), self.runtime, self.limits, self.constants)

    def _bound(self, shares: Shares) -> float:
        return max(self._least(i, share) for i, share in enumerate(shares) if share)

    def _search(self, group: int, share: int) -> None:
        deadline = self.deadline if self.best else float("inf")
        price = (self.runtime, self.limits, self.constants)
        search = Search(self._alone(group, share), *price, deadline, known_cuts=self._cuts)
        search.ceiling = self.limit  # a slower group cannot be part of a better plan
        search.first_only = self.late  # without a plan yet, the time limit may pass
        search.run()
        self.explored += search.explored
        self.settled += search.settled
        self._known[group, share] = search

    def _price(self, shares: Shares) -> None:
        """Join the groups' plans into one document and price it; a group without one is too slow."""
        if any(share and not self._known[i, share].best for i, share in enumerate(shares)):
            return
        pipelines: list[Pipeline] = []
        for group, share in enumerate(shares):
            if share:
                search = self._known[group, share]
                first = self.job.cluster.first_rank(group)
                pipelines += plan_of(search.job, search.best[0], search.modes, first).pipelines
        plan = Plan(job=self.job.written(), pipelines=tuple(pipelines))
        found = estimate(self.job, plan, self.runtime, self.constants)
        if found.fits and found.step_seconds < self.limit:
            self.best.insert(0, (found.step_seconds, plan))
            self._shared = shares
