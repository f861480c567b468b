"""A first plan in a fraction of the time of a search: rules of thumb, so that there is always something to show.

Tensor parallelism in a node and ZeRO-1, else ZeRO-3 alone, else ZeRO-3 with states on the host; one sample at a time,
everything repeated, 1F1B. It is about half as fast as the best plan, and what an impatient user gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Any

import numpy as np

from meshwright.cost.constants import Constants
from meshwright.cost.runtime import Runtime
from meshwright.errors import InputError
from meshwright.plan import Job, Plan
from meshwright.search.build import plan_of
from meshwright.search.grids import Grids
from meshwright.search.limits import Limits
from meshwright.search.screen import holdable, sharded
from meshwright.search.solve import Search
from meshwright.search.ways import bare

_SIMPLE = {"ulysses": 1, "ring": 1, "micro_batch": 1, "recompute": "full", "schedule": "1f1b"}
_FORBIDDEN = ("hybrid", "adaptive", "mixed", "placement", "park")


def first_plan(job: Job, runtime: Runtime, limits: Limits, constants: Constants) -> tuple[float, Plan] | None:
    """A plan that fits and keeps the limits, with its seconds, if a rule of thumb finds one."""
    for some in _thumbs(job, limits):
        search = Search(job, runtime, some, constants, first_only=True)
        if not some.allows("offload") and not _holdable(search):
            continue
        search.run()
        if search.best:
            return search.limit, plan_of(job, search.best[0], search.modes)
    return None


def _holdable(search: Search) -> bool:
    """Whether all devices together can hold the states."""
    one = np.ones(1, dtype=np.int64)
    grid = Grids(one, 0 * one, one, one, one * search.job.cluster.devices, one, one, 0 * one)
    return bool(holdable(search.setting, sharded(bare(grid, one)), 1)[0])


def _thumbs(job: Job, limits: Limits) -> Iterator[Limits]:
    """Limits that leave a handful of plans; those that the user's limits rule out are left out."""
    group = job.cluster.groups[0]
    tp = group.devices_per_node
    dp = gcd(job.global_batch, max(job.cluster.devices // tp, 1))
    sharded: dict[str, Any] = {"tp": 1, "zero": 3, "dp": gcd(job.global_batch, job.cluster.devices)}
    tries = [({"offload"}, sharded), (set(), sharded)]
    if all(layer.tensor_parallel for layer in job.model.layers):
        tries = [({"offload"}, {"tp": tp, "zero": 1, "dp": dp // p}) for p in (8, 2, 1) if dp % p == 0] + tries
    for forbidden, fixed in tries:
        try:
            every = {*_FORBIDDEN, *forbidden, *limits.forbidden}
            yield Limits.of({**_SIMPLE, **fixed, **limits.fixed}, every, limits.headroom)
        except InputError:
            continue
