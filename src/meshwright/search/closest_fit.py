"""Report for a job that does not fit: the closest plan, the missing memory, and the cheapest change that helps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.base.units import size
from meshwright.cost.estimate import estimate
from meshwright.errors import DoesNotFit
from meshwright.plans import Job, Plan
from meshwright.search.bounds.pruning import together
from meshwright.search.exact.plan_builder import plan_of
from meshwright.search.exact.solve import Search
from meshwright.search.space.headroom import on_job
from meshwright.search.space.limits import Limits

_EFFORT = 10_000  # per question (`Search.effort`): a plan that exists is found with less


class NothingFits(DoesNotFit):
    """Error of a space without a fitting plan, with the closest plan."""

    def __init__(self, problem: str, *, short_by_bytes: int, closest: Plan | None, suggestion: str) -> None:
        super().__init__(problem, short_by_bytes=short_by_bytes)
        self.closest, self.suggestion = closest, suggestion

    def as_json(self) -> dict[str, object]:
        return {
            "error": str(self),
            "closest": self.closest.to_table() if self.closest else None,
            "short_by_bytes": self.short_by_bytes,
            "suggestion": self.suggestion,
        }


def closest(search: Search, whole: Job | None = None, first: int = 0) -> NothingFits:
    """Find by halving the memory a device would need, then the change of the job that is enough.

    `whole` is the job on all kinds of devices, of which the searched one begins with device `first`.
    """
    job = whole or search.job
    capacity = search.setting.room.memory
    low, high, found = 1.0, 2.0, None
    while found is None and high < 2**20:
        found = _with_memory(search, capacity * high, first)
        low, high = (low, high) if found else (high, 2 * high)
    if found is None:
        return _restricted(search, job)
    for _ in range(5):
        middle = (low + high) / 2
        better = _with_memory(search, capacity * middle, first)
        found, low, high = (better, low, middle) if better else (found, middle, high)
    found = on_job(found, job)
    row = max(estimate(job, found, search.runtime, search.constants).memory, key=lambda row: row.short_by)
    if not row.short_by:  # it would fit: something else excludes it
        return _restricted(search, job)
    problem = (
        f"{job.model.name} does not fit on {job.cluster.name} with any plan: the closest needs {size(row.total)} on "
        f"devices {row.devices} of {size(row.capacity)}, short by {size(row.short_by)}"
    )
    return NothingFits(problem, short_by_bytes=row.short_by, closest=found, suggestion=_suggestion(search))


def _restricted(search: Search, job: Job) -> NothingFits:
    """Report the limit that prevents a plan, if dropping one is enough."""
    problem = f"no plan of {job.model.name} on {job.cluster.name} keeps the restrictions"
    limits = search.limits
    for name, value in limits.fixed.items():
        others = {key: fixed for key, fixed in limits.fixed.items() if key != name}
        if _any(search, replace(limits, fixed=others)):
            return NothingFits(
                problem, short_by_bytes=0, closest=None, suggestion=f"without {name}={value} there is one"
            )
    for name in sorted(limits.forbidden):
        if _any(search, replace(limits, forbidden=limits.forbidden - {name})):
            return NothingFits(problem, short_by_bytes=0, closest=None, suggestion=f"with {name} there is one")
    return NothingFits(problem, short_by_bytes=0, closest=None, suggestion="fix or forbid less")


def _any(search: Search, limits: Limits) -> bool:
    """Return True if a plan keeps other limits, with any amount of memory."""
    return bool(_tried(search, search.job, limits, search.setting.room.memory * 2**20).best)


def _with_memory(search: Search, memory: float, first: int) -> Plan | None:
    """Return the first plan found for devices of `memory` bytes, on devices from number `first`."""
    other = _tried(search, search.job, search.limits, memory)
    return plan_of(search.job, other.best[0], other.modes, first) if other.best else None


def _tried(search: Search, job: Job, limits: Limits, memory: float | None = None) -> Search:
    """Search for the first plan of a job, on devices of `memory` bytes."""
    other = Search(job, search.runtime, limits, search.constants, first_only=True, effort=_EFFORT)
    if memory is not None:
        other.setting = replace(other.setting, room=replace(other.setting.room, memory=memory))
    if together(other.setting):
        other.run()
    return other


def _suggestion(search: Search) -> str:
    for text, job in _changes(search.job):
        if _tried(search, job, search.limits).best:
            return text
    return "a smaller model, or devices with more memory"


def _changes(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield changes of a job, the cheapest first."""
    if job.optimizer == "adamw":
        yield "optimizer adamw-8bit is enough", replace(job, optimizer="adamw-8bit")
    cluster, group = job.cluster, job.cluster.groups[0]
    for factor in (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64):
        groups = (replace(group, nodes=group.nodes * factor), *cluster.groups[1:])
        more = replace(cluster, groups=groups)
        yield f"{group.nodes * factor} nodes instead of {group.nodes} are enough", replace(job, cluster=more)
    for factor in (2, 4, 8):
        if not job.model.tokens and job.seq_len // factor >= 1:
            yield (
                f"a sequence of {job.seq_len // factor} tokens is short enough",
                replace(job, seq_len=job.seq_len // factor),
            )
