"""A first plan in a fraction of the time of a search: rules of thumb, so that there is always something to show.

Tensor parallelism in a node and ZeRO-1, else ZeRO-3 alone, else ZeRO-3 with states on the host; one sample at a time,
everything repeated, 1F1B. It is about half as fast as the best plan, and what an impatient user gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Any

from meshwright.cost.constants import Constants
from meshwright.cost.runtime import Runtime
from meshwright.errors import InputError
from meshwright.plans import Job, Plan
from meshwright.search.build import plan_of
from meshwright.search.limits import Limits
from meshwright.search.screen import together
from meshwright.search.solve import Search

_SIMPLE = {"ulysses": 1, "ring": 1, "micro_batch": 1, "recompute": "full", "schedule": "1f1b"}
_FORBIDDEN = ("hybrid", "adaptive", "mixed", "placement", "park")


def first_plan(job: Job, runtime: Runtime, limits: Limits, constants: Constants) -> tuple[float, Plan] | None:
    """A plan that fits and keeps the limits, with its seconds, if a rule of thumb finds one."""
    for some in _thumbs(job, limits):
        search = Search(job, runtime, some, constants, first_only=True)
        if not together(search.setting, offload=some.allows("offload")):
            continue
        search.run()
        if search.best:
            return search.limit, plan_of(job, search.best[0], search.modes)
    return None


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
