"""Runners-up: the best plans of other kinds than the winner, and the main loss of each.

A second plan that differs in one layer teaches nothing. A runner-up leaves out something the winner uses, or uses
something it leaves out, and is the best that such a search finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.cost.estimate import Estimate, estimate
from meshwright.errors import InputError
from meshwright.plans import Job, Offload, Pipeline, Plan
from meshwright.search.explanation.features import groups_of, spans_of
from meshwright.search.explanation.time_breakdown import losses, percent
from meshwright.search.planner import Answer
from meshwright.search.side_search import answers, limits_of
from meshwright.search.space.limits import Limits

_SAME = 1e-5  # relative; two plans this near teach nothing new
_NEW_SCHEDULES = ("zero-bubble", "zbv", "dualpipev")  # split backward passes


@dataclass(frozen=True)
class RunnerUp:
    """Best plan of a kind."""

    kind: str
    plan: Plan
    estimate: Estimate
    slower: float  # relative to the winner; negative if the winner's search was cut short
    loses: str
    cut_short: bool = False  # its search ran out of time: the best of its kind may be faster

    @property
    def slower_text(self) -> str:
        return ("at most " if self.cut_short else "") + percent(self.slower)

    def to_table(self) -> dict[str, Any]:
        return {
            "kind": self.kind, "step_time_s": self.estimate.step_seconds, "mfu": self.estimate.mfu,
            "peak_memory_bytes": self.estimate.peak_memory, "slower": self.slower, "loses": self.loses,
            "cut_short": self.cut_short, "plan": self.plan.to_table(),
        }  # fmt: skip


def runners_up(answer: Answer, *, most: int = 3, seconds: float = 1.5) -> tuple[RunnerUp, ...]:
    """Return at most `most` plans of other kinds, the fastest first; all searches share `seconds`."""
    if most < 1:
        return ()
    winner = answer.estimate
    job = winner.job
    kinds = list(_kinds(job, answer.plan, limits_of(answer.plan)))
    found: list[RunnerUp] = []
    seen = [answer.plan.pipelines]
    best_plans = answers([(job, limits) for _, limits in kinds], winner.runtime, seconds)
    for (kind, _), best in zip(kinds, best_plans, strict=True):
        alike = best and any(abs(best.estimate.step_seconds / r.estimate.step_seconds - 1) < _SAME for r in found)
        if best and not alike and best.plan.pipelines not in seen:
            seen.append(best.plan.pipelines)
            slower = best.estimate.step_seconds / winner.step_seconds - 1
            found.append(
                RunnerUp(kind, best.plan, best.estimate, slower, losses(winner, best.estimate), not best.proven)
            )
    found = sorted(found, key=lambda r: r.slower)[:most]
    return (*found, *_on_the_way(answer, seen, most - len(found)))


def _on_the_way(answer: Answer, seen: list[tuple[Pipeline, ...]], most: int) -> Iterator[RunnerUp]:
    """Yield plans that were best for a while, if there are too few of other kinds."""
    winner = answer.estimate
    for other in [plan for plan in answer.others if plan.pipelines not in seen][: max(most, 0)]:
        priced = estimate(winner.job, other, winner.runtime)
        slower = priced.step_seconds / winner.step_seconds - 1
        yield RunnerUp("best for a while", other, priced, slower, losses(winner, priced))


def _kinds(job: Job, plan: Plan, limits: Limits) -> Iterator[tuple[str, Limits]]:
    """Yield (name, limits) of other kinds, within the user's limits."""
    for name, fixed, forbidden in _other(job, plan):
        try:
            both = Limits.of({**fixed, **limits.fixed}, {*forbidden, *limits.forbidden}, limits.headroom)
        except InputError:
            continue  # the user has fixed a value that this kind forbids
        if (both.fixed, both.forbidden) != (limits.fixed, limits.forbidden):
            yield name, both


def _other(job: Job, plan: Plan) -> Iterator[tuple[str, dict[str, Any], tuple[str, ...]]]:
    """Yield (name, fixed values, forbidden names) of kinds that differ from a plan's."""
    spans, pipeline = list(spans_of(plan)), plan.pipelines[0]
    if groups_of(pipeline) > 1:
        yield "no pipeline", {}, ("pp",)
        if pipeline.schedule.name in _NEW_SCHEDULES:
            yield "whole backward passes", {}, _NEW_SCHEDULES
    else:
        yield from ((f"pipeline of {pp}", {"pp": pp}, ()) for pp in (2, 4) if pp <= job.cluster.devices)
    if any(span.tp > 1 for span in spans):
        yield "no tensor parallelism", {}, ("tp",)
    elif (tp := min(8, job.cluster.groups[0].devices_per_node)) > 1:
        yield f"tensor parallelism of {tp}", {"tp": tp}, ()
    if any(span.zero == 3 for span in spans):
        yield "no ZeRO-3", {}, ("zero3",)
    else:
        yield "ZeRO-3", {"zero": 3}, ()
    if any(span.offload != Offload() for span in spans):
        yield "no offload", {}, ("offload",)
    if any(span.recompute != "none" for span in spans):
        yield "no recomputation", {}, ("recompute",)
    for name, title in (("ulysses", "Ulysses"), ("ring", "ring attention"), ("ep", "expert parallelism")):
        if any(getattr(span, name) > 1 for span in spans):
            yield f"no {title}", {}, (name,)
