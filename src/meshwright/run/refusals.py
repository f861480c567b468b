"""What a plan may ask for and cannot be run yet: said by name, before any process starts."""

from __future__ import annotations

from meshwright.errors import InputError
from meshwright.plan import Plan

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")


def refuse(plan: Plan) -> None:
    """Raise the first thing that cannot be run.

    >>> import meshwright as mw
    >>> job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("2xh100"), 4, seq_len=32)
    >>> try:
    ...     refuse(mw.Plan.of({"tp": 2, "compression": [{"layers": "head", "algorithm": "onebit"}]}, job))
    ... except InputError as error:
    ...     print(error.field, error.problem)
    compression compressed gradients cannot be run yet
    """
    job = plan.job
    if job.precision not in PRECISIONS:
        raise InputError(f"{job.precision} cannot be run yet", field="job.precision", valid=", ".join(PRECISIONS))
    if job.optimizer == "adamw-8bit" and job.precision == "fp16":
        problem = "adamw-8bit keeps no float32 copy, and rounds by chance to bfloat16 only"
        raise InputError(problem, field="job.optimizer", valid="adamw, adamw-16bit, or precision bf16")
    if plan.compression:
        raise InputError("compressed gradients cannot be run yet", field="compression", valid="none")
