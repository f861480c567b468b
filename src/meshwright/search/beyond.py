"""Steps beyond the space that the search proves: they start from its best plans, and only ever make the answer faster.

Layers that choose for themselves (`layers.py`), fractions of offload (`trim.py`), swaps between devices (`swap.py`),
compressed gradients (`compress.py`).
"""

from __future__ import annotations

from meshwright.plans import Plan
from meshwright.plans.strategy import Offload
from meshwright.search.build import plan_of
from meshwright.search.compress import compressed
from meshwright.search.layers import best_layered
from meshwright.search.solve import Search
from meshwright.search.swap import swapped
from meshwright.search.trim import spans_with_groups, trimmed

_STARTS = 3  # shapes whose best plans are refined
_NEAR = 1.01  # of the best plan's time: none of these steps was seen to gain more


def refined(search: Search, solver: str = "exact", time_limit: float | None = None) -> Plan | None:
    """A plan that is faster than the search's best, if one of the steps finds it."""
    job, price = search.job, (search.runtime, search.constants)
    near = sorted(search.by_shape.values(), key=lambda found: found.seconds)[:_STARTS]
    plans = [(f.seconds, plan_of(job, f, search.modes)) for f in near if f.seconds < _NEAR * search.limit]
    layered = best_layered(search, solver, time_limit)
    found = [layered] if layered else []
    plans = found + plans
    for seconds, plan in plans:
        if search.late:
            break
        if search.limits.allows("partial") and any(span.offload != Offload() for _, span in spans_with_groups(plan)):
            known = search.setting.partial and (seconds, plan) not in found
            found = [*found, trimmed(job, plan, seconds, *price, known=known)]
    if search.limits.allows("swap") and plans and not search.late:
        start = min(found, key=lambda item: item[0], default=plans[0])[1]
        found.append(swapped(job, start, *price, search.limits))
    if search.runtime.codecs and search.limits.allows("compression") and plans and not search.late:
        seconds, plan = min([*found, *plans], key=lambda item: item[0])
        found.append(compressed(job, plan, seconds, *price))
    best = min(found, key=lambda item: item[0], default=None)
    return best[1] if best and best[0] < search.limit * (1 - 1e-9) else None
