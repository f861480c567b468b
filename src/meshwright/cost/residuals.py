"""Memory of compressed gradients: what was not said yet is kept in float32, for every number a process encodes."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.cost.runtime import Runtime, cut_of
from meshwright.plans import Job, Plan, Span
from meshwright.plans.spans import layers_of

_BYTES = 4


def residual_bytes(job: Job, plan: Plan, spans: Iterable[Span], runtime: Runtime) -> int:
    """On one device that runs these spans. Also under ZeRO they are of whole gradients, since a process sends shares of all
    shards; only where several sets of shards are summed (hybrid) they are of the own shard.

    >>> table = {"model": "tiny-llama", "cluster": "2xcpu", "global_batch": 4, "seq_len": 32, "precision": "fp32"}
    >>> plan = Plan.of({**table, "zero": 1, "compression": [{"layers": "embed..head", "algorithm": "int8"}]})
    >>> from meshwright.cost.runtime import RUNTIMES
    >>> job, spans = plan.resolve(), plan.pipelines[0].stages[0].spans
    >>> residual_bytes(job, plan, spans, RUNTIMES["meshwright"]) == 4 * job.model.parameters
    True
    """
    named = {layer.name for rule in plan.compression for layer in layers_of(job.model, rule.layers)}
    total = 0.0
    for span in spans:
        if span.replicas < 2:
            continue
        cut, shards = cut_of(span, 1, job, runtime), span.shards(span.replicas)
        hybrid = span.zero > 0 and 1 < shards < span.replicas
        for layer in layers_of(job.model, span.layers):
            if layer.name in named:
                trained = float(layer.parameters_on(cut) - layer.frozen_parameters_on(cut))
                total += _BYTES * trained / (shards if hybrid else 1)
    return round(total)
