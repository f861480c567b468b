"""Compress gradients where that makes a plan faster: with the codecs that the runtime offers, by kind of layer.

What hides under the backward pass need not shrink, and shrinking takes time of its own: so every codec is tried on all
layers first, then kinds of layers are left alone again while that helps (HiPress decides in the same spirit).
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


def compressed(job: Job, plan: Plan, seconds: float, runtime: Runtime, constants: Constants) -> tuple[float, Plan]:
    """The fastest plan found with compressed gradients, and its seconds; the plan itself if none is faster."""
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
    """One rule for every run of layers of these kinds."""
    for chosen, some in groupby(range(len(model.layers)), key=lambda i: model.layers[i].kind in kinds):
        if chosen:
            where = list(some)
            yield Compression(layers=span_name(model, range(where[0], where[-1] + 1)), algorithm=algorithm)
