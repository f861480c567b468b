"""Number of processes that a user starts, and the command for it."""

from __future__ import annotations

from meshwright.frameworks.contract import Inexpressible
from meshwright.plans import Job, Plan


def processes(job: Job, plan: Plan) -> tuple[int, int]:
    """Return the nodes, and processes on each of them."""
    sizes = {group.devices_per_node for group in job.cluster.groups}
    each = min(sizes)
    if plan.devices <= each:
        return 1, plan.devices
    if len(sizes) > 1 or plan.devices % each:
        nodes = " and ".join(map(str, sorted(sizes)))
        raise Inexpressible(f"{plan.devices} devices are not whole nodes of {nodes}; launchers start as many on each")
    return plan.devices // each, each


def torchrun(job: Job, plan: Plan) -> str:
    """Return the start of the command; $MASTER_ADDR is the first of several nodes."""
    nodes, each = processes(job, plan)
    if nodes == 1:
        return f"torchrun --nproc_per_node {each}"
    return f"torchrun --nnodes {nodes} --nproc_per_node {each} --rdzv_backend c10d --rdzv_endpoint $MASTER_ADDR:29500"
