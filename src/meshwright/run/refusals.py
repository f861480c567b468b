"""What a plan may ask for and cannot be run yet: said by name, before any process starts."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import InputError
from meshwright.plan import Plan, Span

OPTIMIZERS = ("adamw", "adamw-16bit", "adamw-8bit", "sgd", "sgd-momentum")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")


def refuse(plan: Plan) -> None:
    """Raise the first thing that cannot be run.

    >>> import meshwright as mw
    >>> job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("2xh100"), 4, seq_len=32, optimizer="muon")
    >>> try:
    ...     refuse(mw.Plan.of({"tp": 2}, job))
    ... except InputError as error:
    ...     print(error.field, error.problem)
    job.optimizer muon cannot be run yet
    """
    job = plan.job
    for name, said, valid in (("precision", job.precision, PRECISIONS), ("optimizer", job.optimizer, OPTIMIZERS)):
        if said not in valid:
            raise InputError(f"{said} cannot be run yet", field=f"job.{name}", valid=", ".join(valid))
    for field, span in _spans(plan):
        away, sharded = span.offload.parameters, span.zero == 3 and span.shards(span.replicas) > 1
        if away and (away < 1 or not sharded):
            problem = f"{away:g} of the parameters at zero={span.zero} cannot be run"
            raise InputError(problem, field=f"{field}.offload.parameters", valid="0, or 1 with zero=3 over replicas")
        if span.offload.optimizer and job.optimizer not in ("adamw", "adamw-16bit"):
            problem = f"{job.optimizer} cannot keep its states on the host"
            raise InputError(problem, field=f"{field}.offload.optimizer", valid="0, or adamw or adamw-16bit")
    if plan.compression:
        raise InputError("compressed gradients cannot be run yet", field="compression", valid="none")


def _spans(plan: Plan) -> Iterator[tuple[str, Span]]:
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for i, span in enumerate(stage.spans):
                yield f"pipelines[{p}].stages[{s}].spans[{i}]", span
