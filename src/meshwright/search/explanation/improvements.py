"""Improvements: the same job with a little more of something, planned or priced again.

A plan from a search is searched again under the same limits, a short time for each change. A plan by hand is only
priced again, since a new search would mostly show its distance from the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log2

from msgspec.structs import replace as changed

from meshwright.base.units import GIB, size
from meshwright.clusters import Link
from meshwright.cost.estimate import Estimate, estimate
from meshwright.plans import Job, Plan
from meshwright.plans.job import LARGEST_BATCH
from meshwright.search.explanation.time_breakdown import MEMORY_SAVERS, Spending, percent
from meshwright.search.side_search import answers, limits_of, quick
from meshwright.search.space.headroom import with_memory
from meshwright.search.space.limits import Limits

_VISIBLE = 0.0005  # a smaller gain is not worth a line


@dataclass(frozen=True)
class Help:
    """One change and its gain in tokens per second."""

    change: str
    gain: float
    at_least: bool = False  # its search ran out of time
    note: str = ""

    @property
    def text(self) -> str:
        least = "at least " if self.at_least else ""
        return f"{self.change}: " + (self.note or f"{least}{percent(self.gain)}")


@dataclass(frozen=True)
class Variation:
    """Changed job."""

    change: str
    job: Job


def helps(found: Estimate, seconds: float) -> tuple[Help, ...]:
    """Return the changes that make it fit or gain something, the greatest first; all searches share `seconds`."""
    more = _searched(found, seconds) if found.plan.search else _priced(found, seconds)
    made = [h for h in (*more, *without(found)) if h.gain >= _VISIBLE or h.note]
    return tuple(sorted(made, key=lambda h: (not h.note, -h.gain)))


def without(found: Estimate) -> list[Help]:
    """Return gains by arithmetic: the step less the time of a part."""
    spent = Spending.of(found)
    saving = sum(spent.exposed.get(axis, 0.0) for axis in MEMORY_SAVERS)
    parts = {
        "no bubble": spent.groups["bubble"],
        "nothing repeated or fetched back": spent.groups["recompute"] + saving,
        "all communication hidden": spent.groups["communication"] - saving + spent.groups["gradients"],
    }
    return [Help(name, found.step_seconds / (found.step_seconds - s) - 1) for name, s in parts.items()]


def variations(job: Job) -> list[Variation]:
    """Return jobs with more memory, a larger batch, a faster network."""
    found = [_memory(job)]
    if 2 * job.global_batch <= LARGEST_BATCH:
        twice = 2 * job.global_batch
        found.append(Variation(f"batch {twice:,}", replace(job, global_batch=twice)))
    if job.cluster.devices > 1:
        found.append(_network(job))
    return found


def _memory(job: Job) -> Variation:
    """Return a job with about a tenth more memory, a round number."""
    least = min(group.device.memory for group in job.cluster.groups)
    extra = 2 ** max(round(log2(least / 10 / GIB)), 0) * GIB
    text = f"{size(extra).replace('.0', '')} more per device"
    return Variation(text, with_memory(job, lambda memory: memory + extra))


def _network(job: Job) -> Variation:
    """Return a job with twice the rate of the outermost links: between nodes, or inside the only one."""
    cluster = job.cluster
    groups = [replace(g, links=(*g.links[:-1], _doubled(g.links[-1]))) for g in cluster.groups]
    between = _doubled(cluster.between) if cluster.between else None
    one = cluster.devices == cluster.groups[0].devices_per_node
    text = "links inside the node twice as fast" if one else "network twice as fast"
    if one:
        groups = [replace(g, links=tuple(map(_doubled, g.links))) for g in cluster.groups]
    return Variation(text, replace(job, cluster=replace(cluster, groups=tuple(groups), between=between)))


def _doubled(link: Link) -> Link:
    return replace(link, bandwidth=2 * link.bandwidth, aggregate=2 * link.aggregate)


def _searched(found: Estimate, seconds: float) -> Iterator[Help]:
    some, limits = variations(found.job), limits_of(found.plan)
    best_plans = answers([(variation.job, limits) for variation in some], found.runtime, seconds)
    for variation, best in zip(some, best_plans, strict=True):
        if best:
            yield Help(variation.change, _gain(found, best.estimate), not best.proven)


def _priced(found: Estimate, seconds: float) -> Iterator[Help]:
    """Yield the gains of a plan by hand: as it is on the changed job, and with the best plan."""
    best = quick(found.job, found.runtime, Limits(), seconds)
    if best and found.fits:
        yield Help("the best plan", _gain(found, best.estimate), not best.proven)
    elif best:
        yield Help("the best plan", 0.0, note=f"fits, and a step takes {best.estimate.step_seconds:.3g} s")
    for variation in variations(found.job):
        plan = on_batch(found.plan, variation.job.global_batch)
        if plan:
            again = estimate(variation.job, plan, found.runtime)
            if again.fits and not found.fits:
                yield Help(variation.change, 0.0, note="it fits")
            elif again.fits:
                yield Help(variation.change, _gain(found, again))


def on_batch(plan: Plan, batch: int) -> Plan | None:
    """Return the plan with more micro-batches of the same size, or None if that is impossible."""
    factor, rest = divmod(batch, plan.job.global_batch)
    if factor == 1 and not rest:
        return plan
    if rest or any(p.schedule.name == "custom" for p in plan.pipelines):
        return None
    pipelines = tuple(
        changed(p, batch=factor * p.batch, micro_batches=factor * p.micro_batches) for p in plan.pipelines
    )
    return changed(plan, job=changed(plan.job, global_batch=batch), pipelines=pipelines)


def _gain(found: Estimate, other: Estimate) -> float:
    """Return the relative gain in tokens per second of the whole job."""
    ours, theirs = (e.job.tokens_per_step / e.step_seconds for e in (found, other))
    return theirs / ours - 1
