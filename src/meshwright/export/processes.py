"""How many processes a user starts, and with which command."""

from __future__ import annotations

from meshwright.plan import Job, Plan


def processes(job: Job, plan: Plan) -> tuple[int, int]:
    """Nodes, and processes on each of them."""
    each = min(group.devices_per_node for group in job.cluster.groups)
    if plan.devices <= each:
        return 1, plan.devices
    return -(-plan.devices // each), each


def torchrun(job: Job, plan: Plan) -> str:
    """The beginning of the command; $MASTER_ADDR is the first of several nodes."""
    nodes, each = processes(job, plan)
    if nodes == 1:
        return f"torchrun --nproc_per_node {each}"
    return f"torchrun --nnodes {nodes} --nproc_per_node {each} --rdzv_backend c10d --rdzv_endpoint $MASTER_ADDR:29500"
