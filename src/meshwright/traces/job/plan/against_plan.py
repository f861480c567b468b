"""Compare a plan's prediction with its run, and suggest what to do about the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.plans import Plan
from meshwright.traces.job.across import Across, across
from meshwright.traces.job.plan.predicted import CLASSES, PARTS, REST, Promise, promised
from meshwright.traces.job.steps import by_step, unmarked
from meshwright.traces.rank.facts import RankFacts
from meshwright.traces.rank.kernel_classes import CLASSES as KERNELS

# Parts of StepParts that each predicted part is compared with, and classes of kernels for classes of operators.
MEASURED = {
    "compute": ("compute",), "exposed": ("transfer",), "waiting": ("waiting",), "bubble": ("bubble",),
    "host": ("host_bound", "idle"), "copies": ("copies",),
}  # fmt: skip
KINDS = {
    "products": ("product",),
    "attention": ("attention",),
    "norms": ("normalisation",),
    "optimizer": ("optimizer",),
}
OFF = 0.05  # share of the step, or of the quantity: smaller differences are within the cost model's accuracy


@dataclass(frozen=True)
class Pair:
    """Predicted and measured value: seconds per step, or bytes."""

    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Ratio of measured to predicted; 0 if nothing was predicted."""
        return self.measured / self.predicted if self.predicted else 0.0


@dataclass(frozen=True)
class GroupPair:
    """Comparison of one device group: the devices of one stage, or of several that share them."""

    pipeline: int
    group: int
    ranks: tuple[int, ...]  # ranks of the group that have traces
    parts: tuple[Pair, ...]  # parts of the step; each side adds up to it
    classes: tuple[Pair, ...]  # classes of computing
    memory: Pair | None  # bytes of tensors on the rank with the highest peak; None if allocations were not recorded


@dataclass(frozen=True)
class Against:
    """Comparison of a plan with its run."""

    step: Pair
    groups: tuple[GroupPair, ...]
    suggestions: tuple[str, ...]  # the largest saving first
    notes: tuple[str, ...]  # why something could not be compared; the only content if there are no groups


def compare(facts: Sequence[RankFacts], plan: Plan, job: Across | None = None) -> Against:
    """Compare predictions with measurements. Rank i of the run works on the i-th device that the plan uses.

    `job` is the comparison of the ranks, if it has been made already.
    """
    job = job or across(facts)
    found, promises = promised(plan)
    rank_of = {device: rank for rank, device in enumerate(plan.used)}
    without = unmarked(facts)
    place_of = {rank: place for place, rank in enumerate(job.ranks) if place not in without}
    lengths = job.parts.length[job.parts.present.all(axis=1)] if job.parts.length.size else job.parts.length
    step = Pair("step", found.step_seconds, float(np.median(lengths.mean(axis=0))) * 1e-9 if lengths.size else 0.0)
    if other := _other_job(facts, job, plan):
        return Against(step, (), (), (other,))  # a comparison would mean nothing
    groups, notes = [], []
    for promise in promises:
        ranks = tuple(rank for device in promise.devices if (rank := rank_of[device]) in place_of)
        if ranks:
            groups.append(_group(facts, job, promise, ranks, [place_of[rank] for rank in ranks]))
        else:
            notes.append(f"no trace of the {_name(promise.pipeline, promise.group, len(plan.pipelines))}")
    return Against(step, tuple(groups), _suggestions(step, groups, plan), tuple(notes))


def _other_job(facts: Sequence[RankFacts], job: Across, plan: Plan) -> str:
    """Return why the traces cannot be of this plan's run, or ""."""
    worlds = {one.world_size for one in facts if one.world_size}
    if worlds and plan.devices not in worlds:
        told = f"of a job of {max(worlds)} rank{'s' * (max(worlds) != 1)}"
    elif len(job.ranks) and max(job.ranks) >= plan.devices:
        told = f"of rank {max(job.ranks)}"
    else:
        return ""
    devices = f"{plan.devices} device{'s' * (plan.devices != 1)}"
    return f"the traces tell {told}, the plan of {devices}: is it this run's plan? They are not compared"


def _group(
    facts: Sequence[RankFacts], job: Across, promise: Promise, ranks: tuple[int, ...], places: list[int]
) -> GroupPair:
    """Return the group's mean over ranks of the median over steps."""
    parts = []
    for name in PARTS:
        spent = sum(getattr(job.parts, part)[places] for part in MEASURED[name])
        parts.append(Pair(name, promise.parts[name], float(np.median(spent.mean(axis=0))) * 1e-9))
    by_rank = {one.rank: one for one in facts}
    mine = [by_rank[rank] for rank in ranks if by_rank[rank].devices]
    spent = by_step(mine, [one.devices[0].by_class for one in mine]) if mine else np.zeros((1, 1, len(KERNELS)))
    each = np.median(spent.mean(axis=0), axis=0) * 1e-9
    named = {name: sum(float(each[KERNELS.index(kind)]) for kind in kinds) for name, kinds in KINDS.items()}
    named[REST] = float(each.sum()) - sum(named.values())
    peaks = [one.memory.allocated for one in mine if one.memory]
    return GroupPair(
        pipeline=promise.pipeline,
        group=promise.group,
        ranks=ranks,
        parts=tuple(parts),
        classes=tuple(Pair(name, promise.classes.get(name, 0.0), named[name]) for name in CLASSES),
        memory=Pair("memory", float(promise.memory), float(max(peaks))) if peaks else None,
    )


def _name(pipeline: int, group: int, pipelines: int) -> str:
    return f"stage {group}" + (f" of pipeline {pipeline}" if pipelines > 1 else "")


def _suggestions(step: Pair, groups: list[GroupPair], plan: Plan) -> tuple[str, ...]:
    """Return suggestions, sorted by the seconds of a step that they concern."""
    found = [
        *_slower_classes(step, groups),
        *_larger_parts(step, groups),
        *_uneven(step, groups, plan),
        *_memory(groups),
    ]
    return tuple(text for _, text in sorted(found, key=lambda pair: -pair[0]))


def _mean(groups: list[GroupPair], table: str, name: str) -> Pair:
    rows = [next(row for row in getattr(group, table) if row.name == name) for group in groups]
    return Pair(name, *(sum(getattr(row, side) for row in rows) / len(rows) for side in ("predicted", "measured")))


def _slower_classes(step: Pair, groups: list[GroupPair]) -> list[tuple[float, str]]:
    found = []
    for name in CLASSES if groups else ():
        row = _mean(groups, "classes", name)
        lost = row.measured - row.predicted
        # A class that is slow in one stage only is not due to the device's rates.
        alone = [_mean([group], "classes", name) for group in groups]
        least = min((one.ratio for one in alone if one.predicted), default=0.0)
        if least > 1 + OFF and lost > 0.01 * step.measured:
            rate = f"{name} run at {row.predicted / row.measured:.0%} of the speed that the plan assumed"
            found.append((lost, f"{rate}: run `meshwright measure` on this cluster and plan again"))
        elif row.predicted > 0 and -lost > OFF * row.predicted and -lost > OFF * step.predicted and row.measured > 0:
            rate = f"{name} take {row.measured / row.predicted:.0%} of the time that the plan assumed"
            found.append((-lost, f"{rate}: with `meshwright measure` a better plan may be found"))
    return found


INSTEAD = "of the step where the plan promised"
ADVICE = {
    "exposed": f"exposed communication takes {{}} {INSTEAD} {{}}: measure the links (`meshwright measure`), or plan with "
    "less tensor and more data or pipeline parallelism",
    "waiting": f"ranks wait for late ones for {{}} {INSTEAD} {{}}: see the stragglers",
    "bubble": f"the pipeline's bubble takes {{}} {INSTEAD} {{}}: stages are uneven, or messages between them are slow",
    "host": f"devices wait for their hosts for {{}} {INSTEAD} {{}}: compile the model, use larger micro-batches, or look at "
    "the launch-bound stretches",
    "copies": f"copies take {{}} {INSTEAD} {{}}: offload or swap less",
}


def _larger_parts(step: Pair, groups: list[GroupPair]) -> list[tuple[float, str]]:
    found = []
    for name, advice in ADVICE.items() if groups else ():
        row = _mean(groups, "parts", name)
        lost = row.measured - row.predicted
        if lost > OFF * step.measured:
            shares = (row.measured / step.measured, row.predicted / step.predicted)
            found.append((lost, advice.format(*(f"{share:.0%}" for share in shares))))
    return found


def _uneven(step: Pair, groups: list[GroupPair], plan: Plan) -> list[tuple[float, str]]:
    """Suggest rebalancing if a stage computes longer than the others of its pipeline, and so sets the pace."""
    found = []
    for pipeline in {group.pipeline for group in groups}:
        mine = {group.group: _mean([group], "parts", "compute") for group in groups if group.pipeline == pipeline}
        if len(mine) < 2:
            continue
        slowest = max(mine, key=lambda group: mine[group].measured)
        others = [row for group, row in mine.items() if group != slowest]
        usual = sum(row.measured for row in others) / len(others)
        planned = sum(row.predicted for row in others) / len(others)
        over = mine[slowest].measured / usual - 1 if usual else 0.0
        meant = mine[slowest].predicted / planned - 1 if planned else 0.0
        if over > meant + OFF:
            stage = _name(pipeline, slowest, len(plan.pipelines))
            text = (
                f"{stage} computes {over:.0%} longer than the others (planned: {meant:+.0%}): move a layer away from it"
            )
            found.append((mine[slowest].measured - usual, text))
    return found


def _memory(groups: list[GroupPair]) -> list[tuple[float, str]]:
    """Suggest remedies for the group whose memory exceeds its prediction most."""
    rows = [group.memory for group in groups if group.memory and group.memory.predicted]
    most = max(rows, key=lambda row: row.ratio, default=Pair("memory", 1.0, 1.0))
    if abs(most.ratio - 1) <= 3 * OFF:
        return []
    room = "room for larger micro-batches or less recomputation"
    advice = room if most.ratio < 1 else "the next larger plan may not fit"
    return [(0.0, f"memory peaks at {most.ratio:.0%} of what the plan expected: {advice}")]
