"""Modes of a block's activations: keep them, recompute operators, or offload them.

Recompute is adaptive. Operators are recomputed in the order of the bytes they free per second they cost, so the sets
form a chain from nothing to everything. The two levels that frameworks name are added.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from meshwright.cost.layers.layer import operator_seconds
from meshwright.cost.layers.placement import StagePlacement
from meshwright.models import Layer, Slice
from meshwright.models.layer import Recompute
from meshwright.plans import Job
from meshwright.plans.spans import alike
from meshwright.search.space.limits import Limits

_STEPS = 32  # a set of operators is tried when it frees another 3 % of all activations


@dataclass(frozen=True)
class Mode:
    """Recomputed operators, and the offloaded part of the rest."""

    recompute: Recompute = "none"
    offload: float = 0.0


def modes(job: Job, site: StagePlacement, limits: Limits) -> list[Mode]:
    """Return modes from keeping everything to keeping as little as possible."""
    found: list[Recompute] = ["none"]
    if limits.allows("recompute"):
        if limits.allows("adaptive"):
            found += _chain(job, site)
        found += ["selective", "full"] if limits.allows("selective") else ["full"]
    found = _distinct(job, [r for r in found if limits.keeps("recompute", r)])
    made = [Mode(r) for r in found]
    if (
        limits.allows("offload")
        and limits.allows("park")
        and all(group.host_memory > 0 for group in job.cluster.groups)
    ):
        made += [Mode(r, 1.0) for r in found if isinstance(r, str)]
    return made


def recomputes(modes: list[Mode]) -> list[Recompute]:
    """Return the recompute choices of the modes, each once."""
    return list(dict.fromkeys(mode.recompute for mode in modes))


def _blocks(job: Job) -> list[tuple[Layer, int]]:
    return [(layer, count) for layer, count in alike(job.model.layers) if layer.block]


def _chain(job: Job, site: StagePlacement) -> list[Recompute]:
    """Return growing sets of operators, the cheapest bytes first."""
    cut = Slice(1, job.seq_len, job.precision, fused_attention=site.runtime.fused_attention)
    freed: dict[str, float] = defaultdict(float)
    cost: dict[str, float] = defaultdict(float)
    for layer, count in _blocks(job):
        length = layer.length(job.seq_len)
        for name, seconds in operator_seconds(layer, cut, site.chip, site.runtime).items():
            cost[name] += count * seconds
        for op in layer.ops:
            if op.name in layer.op_names:
                freed[op.name] += count * sum(float(k.bytes(cut, length)) for k in op.keeps if not k.needed_next)
    useful = sorted((name for name in freed if freed[name] > 0), key=lambda name: cost[name] / freed[name])
    total, reached, found = sum(freed.values()), 0.0, []
    for i, name in enumerate(useful):
        step = int(reached / total * _STEPS)
        reached += freed[name]
        if i + 1 == len(useful) or int(reached / total * _STEPS * (1 + 1e-12)) > step:
            found.append(tuple(sorted(useful[: i + 1])))
    return list(found)


def _distinct(job: Job, found: list[Recompute]) -> list[Recompute]:
    """Return distinct choices; of several that recompute the same operators, the named one."""
    seen: dict[object, Recompute] = {}
    layers = [layer for layer, _ in _blocks(job)]
    for recompute in sorted(found, key=lambda r: not isinstance(r, str)):
        sets = tuple(layer.recomputed_ops(recompute) for layer in layers)
        seen.setdefault(("full",) if recompute == "full" else sets, recompute)
    return [r for r in found if r in seen.values()]
