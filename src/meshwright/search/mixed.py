"""Clusters of different devices: every group of equal nodes runs a plan of its own on its share of the batch.

Each share of each group is a search on that group alone, so every group has its own stages, tensor and context
parallelism, recomputation and offload. Shares are counted in equal parts of the batch; combinations are looked at in
the order of their bounds, until none can be faster than the best plan found.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from meshwright.cluster import Cluster
from meshwright.cost.constants import DEFAULT, Constants
from meshwright.cost.estimate import estimate
from meshwright.cost.runtime import Runtime
from meshwright.plan import Job, Pipeline, Plan
from meshwright.search.build import plan_of
from meshwright.search.limits import Limits
from meshwright.search.solve import Search
from meshwright.search.tables import tables

_PARTS = 16  # the batch is shared out in so many parts, or fewer where it does not divide
Shares = tuple[int, ...]  # samples of each group


@dataclass
class MixedSearch:
    """The search over shares; `best` holds (seconds, plan), fastest first."""

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

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    @property
    def limit(self) -> float:
        return self.best[0][0] if self.best else float("inf")

    def run(self) -> None:
        """Look at combinations of shares, least bound first; a search on one group makes a bound exact."""
        waiting = [(self._bound(shares), shares) for shares in self._shares()]
        heapq.heapify(waiting)
        while waiting:
            least, shares = heapq.heappop(waiting)
            self.bound = min(least, self.limit)
            if self.on_step:
                self.on_step(self.limit, self.bound)
            if least >= self.limit:
                break
            if self.late and self.best:
                return
            unknown = [i for i, share in enumerate(shares) if share and (i, share) not in self._known]
            if unknown:
                # The group that takes longest decides; once it is known the combination may be out.
                slowest = max(unknown, key=lambda i: self._least(i, shares[i]))
                self._search(slowest, shares[slowest])
                heapq.heappush(waiting, (self._bound(shares), shares))
            else:
                self._price(shares)
        self.bound, self.finished = self.limit, True

    def _shares(self) -> Iterator[Shares]:
        """Ways to share the batch out; a group may stay idle."""
        batch = self.job.global_batch
        parts = next(n for n in range(min(_PARTS, batch), 0, -1) if batch % n == 0)
        for counts in product(range(parts + 1), repeat=len(self.job.cluster.groups)):
            if sum(counts) == parts and (self.limits.allows("idle") or all(counts)):
                yield tuple(count * batch // parts for count in counts)

    def _alone(self, group: int, share: int) -> Job:
        one = self.job.cluster.groups[group]
        name = f"{one.nodes}x{one.devices_per_node}x{one.device.name}"
        return replace(self.job, cluster=Cluster(name, (one,)), global_batch=share)

    def _least(self, group: int, share: int) -> float:
        """Seconds below which a group cannot be with its share: what its search found, or its fastest layers."""
        if (group, share) in self._known:
            return self._known[group, share].limit
        if (group, 0) not in self._known:
            whole = Search(self._alone(group, self.job.global_batch), self.runtime, self.limits, self.constants)
            found = tables(whole.job, whole.chain, whole.site, self.limits, whole.most_groups)
            whole.bound = min((table.bound for table in found), default=float("inf"))
            self._known[group, 0] = whole
        per_sample = (self._known[group, 0].bound - self.runtime.step_seconds) / self.job.global_batch
        return share * per_sample

    def _bound(self, shares: Shares) -> float:
        return max(self._least(i, share) for i, share in enumerate(shares) if share)

    def _search(self, group: int, share: int) -> None:
        deadline = self.deadline if self.best else float("inf")
        search = Search(self._alone(group, share), self.runtime, self.limits, self.constants, deadline)
        search.run()
        self.explored += search.explored
        self.settled += search.settled
        self._known[group, share] = search

    def _price(self, shares: Shares) -> None:
        """Join the groups' plans into one document and price it."""
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
