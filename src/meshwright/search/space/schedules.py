"""Pipelines that a cluster and a batch allow: numbers of device groups, and schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.plans import Job
from meshwright.plans.schedule import V_SHAPED, Schedule, ScheduleName
from meshwright.search.space.limits import Limits

_ONE_STAGE: tuple[ScheduleName, ...] = ("zero-bubble", "1f1b", "gpipe")
_MOST_VIRTUAL = 8  # stages of one device group


def group_counts(job: Job, limits: Limits, size: int, most: int, *, all_devices: bool) -> list[int]:
    """Return numbers of groups of `size` devices, most first; idle devices are whole nodes, or part of the only one."""
    fixed = limits.fixed.get("pp")
    counts = [fixed] if fixed else [most] if all_devices else range(most, 0, -1)
    wanted = limits.fixed.get("devices", 0 if limits.allows("idle") else job.cluster.devices)
    node = job.cluster.groups[0].devices_per_node
    if not fixed and size < node and job.cluster.groups[0].nodes > 1:
        counts = [p for p in counts if p in (1, most) or p * size % node == 0 or p * size < node]
    return [p for p in counts if p <= most and (not wanted or p * size == wanted)]


def schedules(names: Sequence[str], limits: Limits, groups: int, count: int, most_stages: int) -> Iterator[Schedule]:
    """Yield the schedules among `names` that run these groups and micro-batches."""
    virtual = limits.fixed.get("virtual")
    if groups == 1:
        fixed = limits.fixed.get("schedule")
        if virtual in (None, 1) and list(names) != ["dualpipev"] and fixed in (None, "1f1b", "gpipe"):
            yield Schedule(name="1f1b" if "1f1b" in names or "gpipe" not in names else "gpipe")
        return
    for name in V_SHAPED:
        if name in names and virtual in (None, 2) and (name == "zbv" or count >= 2 * groups):
            yield Schedule(name=name, virtual=2)
    for simple in _ONE_STAGE:
        if simple in names and virtual in (None, 1):
            yield Schedule(name=simple)
    if "interleaved" in names and count % max(1, count // groups) == 0:
        for v in range(2, _MOST_VIRTUAL + 1):
            if virtual in (None, v) and v * groups <= most_stages:
                yield Schedule(name="interleaved", virtual=v)
