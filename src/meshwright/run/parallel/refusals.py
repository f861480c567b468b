"""Refusals, by name and before any process starts, of what a plan may hold and the runtime cannot do yet."""

from __future__ import annotations

from meshwright.errors import InputError
from meshwright.models import Model
from meshwright.plans import Compression, Pipeline, Plan, Span
from meshwright.plans.spans import layers_of

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")


def refuse(plan: Plan) -> None:
    """Raise the first thing that cannot be run.

    >>> import meshwright as mw
    >>> job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("2xh100"), 4, seq_len=32)
    >>> try:
    ...     refuse(mw.Plan.of({"tp": 2, "compression": [{"layers": "head", "algorithm": "oneb1t"}]}, job))
    ... except InputError as error:
    ...     print(error.field, error.problem)
    compression[0].algorithm unknown codec 'oneb1t'
    """
    job = plan.job
    if job.precision not in PRECISIONS:
        raise InputError(f"{job.precision} cannot be run yet", field="job.precision", valid=", ".join(PRECISIONS))
    if job.optimizer == "adamw-8bit" and job.precision == "fp16":
        problem = "adamw-8bit keeps no float32 copy, and rounds by chance to bfloat16 only"
        raise InputError(problem, field="job.optimizer", valid="adamw, adamw-16bit, or precision bf16")
    if plan.compression:
        _refuse_compression(plan)


def refuse_balance(plan: Plan, balance: str) -> None:
    """Refuse a balance loss of the whole batch where a part of a step would not know the routing of the rest."""
    if balance != "batch":
        return
    stages = max(len(pipeline.stages) for pipeline in plan.pipelines)
    counts = {"pipelines": len(plan.pipelines), "stages": stages, "micro-batches": plan.pipelines[0].micro_batches}
    for name, count in counts.items():
        if count > 1:
            problem = f"the loss of a whole batch would depend on the plan, which has {count} {name}"
            valid = "sample, or a plan of one pipeline, one stage and one micro-batch"
            raise InputError(problem, field="--balance", valid=valid)


def _refuse_compression(plan: Plan) -> None:
    from meshwright.run.parallel.compression_rules import asked  # numpy and all codecs, which few plans need

    if plan.job.precision == "fp16":
        problem = "the loss scale changes: what was left unsaid of one step would not fit the next"
        raise InputError(problem, field="compression", valid="precision bf16 or fp32, or no compression")
    model = plan.resolve().model
    for i, rule in enumerate(plan.compression):
        try:
            codec, _ = asked(rule)
        except InputError as error:
            raise InputError(error.problem, field=f"compression[{i}].{error.field}", valid=error.valid) from None
        whole = codec.rounds > 1 or codec.program.sums in ("i8", "i16", "i32")
        for pipeline in plan.pipelines:
            for span in _named(model, rule, pipeline):
                _refuse_span(f"compression[{i}]", rule, span, pipeline, whole=whole)


def _named(model: Model, rule: Compression, pipeline: Pipeline) -> list[Span]:
    """Spans that hold layers which a rule names."""
    named = {layer.name for layer in layers_of(model, rule.layers)}
    return [
        span
        for stage in pipeline.stages
        for span in stage.spans
        if any(layer.name in named for layer in layers_of(model, span.layers))
    ]


def _refuse_span(field: str, rule: Compression, span: Span, pipeline: Pipeline, *, whole: bool) -> None:
    """`whole`: the codec takes whole gradients, or adds up messages of all."""
    replicas = span.dp * span.ulysses * span.ring
    sharded = span.zero > 0 and span.shards(replicas) > 1
    if span.zero > 1 and sharded and pipeline.micro_batches > 1:
        problem = f"ZeRO-{span.zero} sums gradients of {span.layers} in every micro-batch, compressed ones once a step"
        raise InputError(problem, field=f"{field}.layers", valid="zero 0 or 1, or one micro-batch")
    members = rule.options.get("members", replicas)
    if isinstance(members, int | float) and members < replicas:
        problem = f"sums of {members:g} processes fit, {replicas} sum {span.layers}"
        raise InputError(problem, field=f"{field}.options.members", valid=f"{replicas} or more, or none")
    if sharded and whole:
        problem = f"{rule.algorithm} needs whole gradients, ZeRO-{span.zero} cuts those of {span.layers}"
        raise InputError(problem, field=f"{field}.algorithm", valid="another algorithm, or zero 0")
    if span.offload.parameters and replicas > 1 and not sharded:
        problem = f"parameters of {span.layers} are on the host and not sharded: PyTorch sums their gradients itself"
        raise InputError(problem, field=f"{field}.layers", valid="zero 1 or more, or no offload of parameters")
