"""Compress gradients where that makes a plan faster, with the runtime's codecs, by kind of layer.

Communication that overlaps with the backward pass need not shrink, and encoding takes time. Every codec is first tried
on all layers; then kinds of layers are dropped again while that helps (HiPress decides in the same spirit).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from msgspec.structs import replace

from meshwright.cost.constants import Constants
from meshwright.cost.estimate import estimate
from meshwright.cost.runtime import Runtime
from meshwright.models import Model
from meshwright.plans import Compression, Job, Plan
from meshwright.plans.spans import span_name
from meshwright.plans.strategy import Offload
from meshwright.search.exact.plan_builder import plan_of
from meshwright.search.exact.solve import Search
from meshwright.search.refine.layers import best_layered
from meshwright.search.refine.offload import spans_with_groups, trimmed
from meshwright.search.refine.swap import swapped

# Steps beyond the proven space: they start from its best plans, and only ever make the answer faster.


_STARTS = 3  # shapes whose best plans are refined
_NEAR = 1.01  # of the best plan's time: none of these steps gained more in tests


def refined(search: Search, solver: str = "exact", time_limit: float | None = None) -> Plan | None:
    """Return a plan that is faster than the search's best, if one of the steps finds it."""
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


def compressed(job: Job, plan: Plan, seconds: float, runtime: Runtime, constants: Constants) -> tuple[float, Plan]:
    """Return the fastest plan found with compressed gradients, and its seconds; else the plan itself."""
    best = (seconds, plan)
    for codec in runtime.codecs:
        kinds = frozenset(layer.kind for layer in job.model.layers if layer.parameters)
        reached = _priced(job, plan, kinds, codec.name, runtime, constants)
        while len(kinds) > 1:
            fewer = [
                (_priced(job, plan, kinds - {kind}, codec.name, runtime, constants), kind) for kind in sorted(kinds)
            ]
            (less, kind) = min(fewer, key=lambda item: item[0][0])
            if less[0] >= reached[0]:
                break
            reached, kinds = less, kinds - {kind}
        best = min(best, reached, key=lambda item: item[0])
    return best


def _priced(
    job: Job, plan: Plan, kinds: frozenset[str], algorithm: str, runtime: Runtime, constants: Constants
) -> tuple[float, Plan]:
    other = replace(plan, compression=tuple(_rules(job.model, kinds, algorithm)))
    return estimate(job, other, runtime, constants).step_seconds, other


def _rules(model: Model, kinds: frozenset[str], algorithm: str) -> Iterator[Compression]:
    """Yield one rule for every run of layers of these kinds."""
    for chosen, some in groupby(range(len(model.layers)), key=lambda i: model.layers[i].kind in kinds):
        if chosen:
            where = list(some)
            yield Compression(layers=span_name(model, range(where[0], where[-1] + 1)), algorithm=algorithm)
