"""Reserve memory that a plan must leave free: devices are searched as if they had less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from msgspec.structs import replace as changed

from meshwright.plans import Job, Plan


def with_less_memory(job: Job, headroom: float) -> Job:
    """Return the job on devices without the part `headroom` of their memory.

    >>> import meshwright as mw
    >>> job = mw.Job(mw.Model.preset("gpt2"), mw.Cluster.preset("8xh100"), global_batch=64)
    >>> with_less_memory(job, 0.5).cluster.groups[0].device.memory * 2 == job.cluster.groups[0].device.memory
    True
    """
    return with_memory(job, lambda memory: int(memory * (1 - headroom))) if headroom else job


def with_memory(job: Job, change: Callable[[int], int]) -> Job:
    """Return the job on devices whose bytes of memory are changed."""
    groups = [replace(g, device=replace(g.device, memory=change(g.device.memory))) for g in job.cluster.groups]
    return replace(job, cluster=replace(job.cluster, groups=tuple(groups)))


def on_job(plan: Plan, job: Job) -> Plan:
    """Return a plan of such a job as a plan of the original job."""
    return changed(plan, job=job.written())
