"""`plan(job)`: the best plan with its proof, or the reason why the job does not fit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import msgspec
from msgspec.structs import replace
from threadpoolctl import threadpool_limits

from meshwright.base.version import RELEASE
from meshwright.clusters import Cluster
from meshwright.clusters.catalogue import catalogue_version
from meshwright.cost.constants import DEFAULT, Constants, seen_in
from meshwright.cost.estimate import Estimate, estimate
from meshwright.cost.runtime import Runtime, calibration_version, runtime
from meshwright.errors import InputError, UnknownName
from meshwright.plans import Job, Pipeline, Plan, Span, Stage
from meshwright.plans.rules.case import Case
from meshwright.plans.rules.choices import precision_supported
from meshwright.plans.spans import device_text
from meshwright.search.bounds.pruning import together
from meshwright.search.closest_fit import NothingFits, closest
from meshwright.search.exact.plan_builder import plan_of
from meshwright.search.exact.solve import Search
from meshwright.search.hetero.cluster import MixedSearch
from meshwright.search.refine.refine import refined
from meshwright.search.space.headroom import on_job, with_less_memory
from meshwright.search.space.limits import Limits

# Rules of thumb give a first plan in a fraction of a search's time, so that there is always one to show.


_SIMPLE = {"ulysses": 1, "ring": 1, "micro_batch": 1, "recompute": "full", "schedule": "1f1b"}
_FORBIDDEN = ("hybrid", "adaptive", "mixed", "placement", "park")


def first_plan(job: Job, runtime: Runtime, limits: Limits, constants: Constants) -> tuple[float, Plan] | None:
    """Return a plan that fits and keeps the limits, with its seconds, if a rule of thumb finds one."""
    for some in _thumbs(job, limits):
        search = Search(job, runtime, some, constants, first_only=True)
        if not together(search.setting, offload=some.allows("offload")):
            continue
        search.run()
        if search.best:
            return search.limit, plan_of(job, search.best[0], search.modes)
    return None


def _thumbs(job: Job, limits: Limits) -> Iterator[Limits]:
    """Yield limits that leave a handful of plans, within the user's limits."""
    group = job.cluster.groups[0]
    tp = group.devices_per_node
    dp = gcd(job.global_batch, max(job.cluster.devices // tp, 1))
    sharded: dict[str, Any] = {"tp": 1, "zero": 3, "dp": gcd(job.global_batch, job.cluster.devices)}
    tries = [({"offload"}, sharded), (set(), sharded)]
    if all(layer.tensor_parallel for layer in job.model.layers):
        tries = [({"offload"}, {"tp": tp, "zero": 1, "dp": dp // p}) for p in (8, 2, 1) if dp % p == 0] + tries
    for forbidden, fixed in tries:
        try:
            every = {*_FORBIDDEN, *forbidden, *limits.forbidden}
            yield Limits.of({**_SIMPLE, **fixed, **limits.fixed}, every, limits.headroom)
        except InputError:
            continue


_GRACE = 5.0  # seconds beyond a time limit to look for a first plan
SOLVERS = ("exact", "milp")  # of the chain problem of the best shape
Progress = Callable[[float, float], None]  # called with the seconds of the best plan so far and the bound


@dataclass(frozen=True)
class Answer:
    """Plan with its cost, and other plans of the search."""

    plan: Plan
    estimate: Estimate
    others: tuple[Plan, ...] = ()  # plans that were best for a while, fastest first

    @property
    def optimal(self) -> bool:
        """True if nothing in the space can be faster."""
        return bool(self.plan.search and self.plan.search["optimal"])


def plan(
    job: Job,
    runtime_name: str | Runtime = "meshwright",
    *,
    fix: Mapping[str, Any] | str | None = None,
    forbid: Iterable[str] = (),
    time_limit: float | None = None,
    solver: str = "exact",
    headroom: float = 0.0,
    progress: Progress | None = None,
    constants: Constants = DEFAULT,
) -> Answer:
    """Return the fastest plan of the space for a job, as a given framework would run it.

    `headroom` is the part of every device's memory that the plan must leave free.

    >>> import meshwright as mw
    >>> job = mw.Job(mw.Model.preset("gpt2-xl"), mw.Cluster.preset("8xa100-80gb"), global_batch=64, seq_len=1024)
    >>> found = plan(job)
    >>> found.optimal, found.estimate.fits, found.plan.search["gap"]
    (True, True, 0.0)
    """
    if not isinstance(runtime_name, str | Runtime):
        raise InputError(f"is {runtime_name!r}", field="runtime", valid="the name of a runtime")
    framework = runtime(runtime_name) if isinstance(runtime_name, str) else runtime_name
    limits, constants = Limits.of(fix, forbid, headroom), seen_in(job.cluster, constants)
    _checked(job, limits, time_limit, solver)
    # Matrices are small: a second thread of the library would only wait.
    with threadpool_limits(1, user_api="blas"):
        found = _planned(with_less_memory(job, headroom), framework, limits, time_limit, solver, progress, constants)
    if not headroom:
        return found
    priced = estimate(job, on_job(found.plan, job), framework, constants)
    document = replace(priced.plan, estimate=summary(priced))
    return Answer(document, priced, tuple(on_job(other, job) for other in found.others))


def _planned(
    job: Job, framework: Runtime, limits: Limits, time_limit: float | None, solver: str, progress: Progress | None,
    constants: Constants,
) -> Answer:  # fmt: skip
    started = time.monotonic()
    deadline = started + time_limit if time_limit is not None else float("inf")
    if len(job.cluster.groups) > 1:
        return _mixed(MixedSearch(job, framework, limits, constants, deadline, progress), started)
    first = None
    if time_limit is not None or progress is not None:  # the search may be stopped, and a plan is wanted then
        first = first_plan(job, framework, limits, constants)
        if first and progress:
            progress(first[0], 0.0)
    search = Search(job, framework, limits, constants, deadline, on_step=progress, grace=0.0 if first else _GRACE)
    search.has_first = first is not None
    try:
        search.run()
        better = refined(search, solver, time_limit)
    except KeyboardInterrupt:
        if not search.best and not first:
            raise
        better = None
    plans = [plan_of(job, found, search.modes) for found in search.best[:6]]
    if not plans and first:
        plans = [first[1]]
    if not plans and search.late:
        raise InputError(f"no plan was found in {time_limit} s", field="time_limit", valid="more seconds")
    if not plans:
        raise closest(search)
    return _answered(search, [better, *plans] if better else plans, time.monotonic() - started, solver)


def _checked(job: Job, limits: Limits, time_limit: float | None, solver: str) -> None:
    """Refuse impossible requests before the search."""
    if not isinstance(job, Job):
        raise InputError(f"is a {type(job).__name__}", field="job", valid="a Job(model, cluster, ...)")
    if not isinstance(solver, str) or solver not in SOLVERS:
        raise UnknownName("solver", str(solver), SOLVERS, see=", ".join(SOLVERS)).at(field="solver")
    number = isinstance(time_limit, int | float) and not isinstance(time_limit, bool)
    if time_limit is not None and not (number and time_limit >= 0):
        raise InputError(f"is {time_limit!r}", field="time_limit", valid="seconds, 0 or more")
    mixed = len(job.cluster.groups) > 1
    if mixed and "devices" in limits.fixed:
        raise InputError(
            "devices cannot be fixed on a cluster of several kinds", field="fix devices", valid="no devices"
        )
    if mixed and solver != "exact":
        raise InputError("plans for one kind of device only", field="solver", valid="exact")
    idle = limits.fixed.get("devices", job.cluster.devices) < job.cluster.devices
    if idle and not limits.allows("idle"):
        raise InputError("leaves devices idle, which is forbidden", field="fix devices", valid=str(job.cluster.devices))
    supported(job)
    if max(limits.fixed.get("ep", 1), limits.fixed.get("etp", 1)) > 1 and not any(x.experts for x in job.model.layers):
        raise InputError(f"{job.model.name} has no experts", field="fix ep", valid="ep and etp of 1")


def supported(job: Job) -> None:
    """Refuse a precision that a device does not have, before the search."""
    one = Span(layers=f"{job.model.layers[0].name}..{job.model.layers[-1].name}")
    pipelines = []
    for i, group in enumerate(job.cluster.groups):
        first = job.cluster.first_rank(i)
        devices = device_text(list(range(first, first + group.devices)))
        pipelines.append(Pipeline(batch=1, micro_batches=1, stages=(Stage(devices=devices, spans=(one,)),)))
    for broken in precision_supported(Case(Plan(job=job.written(), pipelines=tuple(pipelines)), job)):
        raise InputError(broken.problem, field="precision", valid=broken.valid)


def _mixed(search: MixedSearch, started: float) -> Answer:
    try:
        search.run()
    except KeyboardInterrupt:
        if not search.best:
            raise
    if not search.best:
        job = search.job
        sizes = [group.devices * group.device.memory for group in job.cluster.groups]
        index = sizes.index(max(sizes))
        alone = dataclasses.replace(job, cluster=Cluster(job.cluster.name, (job.cluster.groups[index],)))
        raise closest(
            Search(alone, search.runtime, search.limits, search.constants), job, job.cluster.first_rank(index)
        )
    plans = [plan for _, plan in search.best]
    return _answered(search, plans, time.monotonic() - started, "exact")


def _answered(search: Search | MixedSearch, plans: list[Plan], seconds: float, solver: str) -> Answer:
    """Return the first plan with its proof, and the other plans."""
    job, best = search.job, plans[0]
    found = estimate(job, best, search.runtime, search.constants)
    gap = max(0.0, 1 - search.bound / found.step_seconds)
    proven = gap <= 1e-12
    bound = found.step_seconds if proven else search.bound
    facts = {
        "solver": solver, "seconds": round(seconds, 4), "optimal": proven, "bound": bound,
        "gap": 0.0 if proven else gap, "space_bound": search.bound, "explored": search.explored, "simulated": search.settled,
        "runtime": search.runtime.name, "fixed": dict(search.limits.fixed), "forbidden": sorted(search.limits.forbidden),
        "headroom": search.limits.headroom, "made_by": made_by(),
    }  # fmt: skip
    document = replace(best, search=facts, estimate=summary(found))
    return Answer(document, found, tuple(plans[1:6]))


def made_by() -> dict[str, str]:
    """Return which release, catalogue and calibration make the answers of this program."""
    return {
        "meshwright": RELEASE, "catalogue": catalogue_version(), "calibration": calibration_version(),
    }  # fmt: skip


def summary(found: Estimate) -> dict[str, Any]:
    """Return an estimate as a plan document stores it."""
    return {
        "step_time_s": found.step_seconds,
        "tokens_per_s_per_device": found.tokens_per_second_per_device,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "peak_memory_bytes": found.peak_memory,
        "seconds": found.breakdown,
        "stages": [
            msgspec.structs.asdict(row) | {"peak_memory_bytes": row.total, "free_bytes": row.capacity - row.total}
            for row in found.memory
        ],
    }


__all__ = ["Answer", "NothingFits", "plan", "summary"]
