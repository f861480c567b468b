"""Short searches: the best plan within a short time, or none, without advice if nothing fits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.base.parallel import in_parallel, workers
from meshwright.cost.constants import DEFAULT, seen_in
from meshwright.cost.estimate import Estimate, estimate
from meshwright.cost.runtime import Runtime
from meshwright.errors import InputError
from meshwright.plans import Job, Plan
from meshwright.search.exact.plan_builder import plan_of
from meshwright.search.exact.solve import Search
from meshwright.search.hetero.cluster import MixedSearch
from meshwright.search.refine.refine import refined
from meshwright.search.space.headroom import on_job, with_less_memory
from meshwright.search.space.limits import Limits


@dataclass(frozen=True)
class Quick:
    """Result of a short search."""

    plan: Plan
    estimate: Estimate
    proven: bool  # nothing under its limits is faster


def quick(job: Job, runtime: Runtime, limits: Limits, seconds: float) -> Quick | None:
    """Return the best plan found within `seconds` under some limits, or None."""
    deadline, whole = time.monotonic() + seconds, job
    job, constants = with_less_memory(job, limits.headroom), seen_in(job.cluster, DEFAULT)
    if len(job.cluster.groups) > 1:
        mixed = MixedSearch(job, runtime, limits, constants, deadline)
        mixed.run()
        plan, proven = (mixed.best[0][1] if mixed.best else None), mixed.finished
    else:
        search = Search(job, runtime, limits, constants, deadline)
        search.run()
        proven = time.monotonic() <= deadline and search.bound >= search.limit * (1 - 1e-12)
        plan = refined(search) or (plan_of(job, search.best[0], search.modes) if search.best else None)
    if not plan:
        return None
    plan = on_job(plan, whole)
    return Quick(plan, estimate(whole, plan, runtime), proven)


def limits_of(plan: Plan) -> Limits:
    """Return the limits that a plan was searched under, from its document; none for a plan written by hand."""
    facts = plan.search or {}
    fixed, forbidden, headroom = (facts.get(k, d) for k, d in (("fixed", {}), ("forbidden", []), ("headroom", 0.0)))
    names = forbidden if isinstance(forbidden, list) else [forbidden]
    if not isinstance(fixed, dict) or not all(isinstance(name, str) for name in names):
        raise InputError("holds no limits of a search", field="search", valid='"fixed": {}, "forbidden": []')
    try:
        return Limits.of(fixed, names, headroom)
    except InputError as error:
        raise error.at(field="search") from None


@dataclass(frozen=True)
class Question:
    """Job to be planned under some limits."""

    job: Job
    runtime: Runtime
    limits: Limits
    seconds: float

    def answer(self) -> Quick | None:
        return quick(self.job, self.runtime, self.limits, self.seconds)


def answers(jobs: Sequence[tuple[Job, Limits]], runtime: Runtime, seconds: float) -> list[Quick | None]:
    """Return the best plans for several jobs, on all cores, in about `seconds` together."""
    each = seconds * workers(len(jobs)) / max(len(jobs), 1)
    questions = [Question(job, runtime, limits, each) for job, limits in jobs]
    found: list[Quick | None] = [None] * len(questions)
    for i, answer in in_parallel(Question.answer, questions):
        found[i] = answer
    return found
