"""Memory that a plan must leave free: devices are searched as if they had less."""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as changed

from meshwright.plan import Job, Plan


def with_less_memory(job: Job, headroom: float) -> Job:
    """The same job on devices without the part `headroom` of their memory.

    >>> import meshwright as mw
    >>> job = mw.Job(mw.Model.preset("gpt2"), mw.Cluster.preset("8xh100"), global_batch=64)
    >>> with_less_memory(job, 0.5).cluster.groups[0].device.memory * 2 == job.cluster.groups[0].device.memory
    True
    """
    if not headroom:
        return job
    groups = [
        replace(group, device=replace(group.device, memory=int(group.device.memory * (1 - headroom))))
        for group in job.cluster.groups
    ]
    return replace(job, cluster=replace(job.cluster, groups=tuple(groups)))


def on_job(plan: Plan, job: Job) -> Plan:
    """A plan that was found for such a job, as a plan of the job itself."""
    return changed(plan, job=job.written())
