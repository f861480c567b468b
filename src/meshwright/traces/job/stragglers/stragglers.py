"""Stragglers: which rank is slow, in what, since which step, and at what cost. None if all ranks are alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.job.across import Across
from meshwright.traces.job.collectives.matching import calls_of_rank
from meshwright.traces.job.collectives.ordering import Ints
from meshwright.traces.job.steps import by_step
from meshwright.traces.job.stragglers.slow_links import slow_links
from meshwright.traces.job.stragglers.slow_ranks import Slow, excess, slow
from meshwright.traces.rank.facts import RankFacts
from meshwright.traces.rank.kernel_classes import CLASSES

# Cost of slow ranks: by how much a step would be shorter if they were as fast as their peers.


NOBODY = np.iinfo(np.int64).min


def costs_of(facts: Sequence[RankFacts], job: Across, places: Ints, steps: Ints, most: float) -> int:
    """Return the nanoseconds of a step that others only waited for these ranks: the mean of some steps, at most `most`.

    In every collective that one of them joined last, the others could have started when the last of the others arrived.
    Ranks of one finding are late in parallel: the largest delay counts.
    """
    aligned, matched = job.aligned, job.aligned.matched
    others = ~np.isin(matched.place, places)
    ready = np.full(len(matched.group), NOBODY)
    np.maximum.at(ready, matched.call[others], aligned.start[others])
    tells = aligned.split & (ready != NOBODY)
    led = tells & np.isin(aligned.late, places)
    ahead = np.where(led, np.maximum(aligned.last - np.where(led, ready, 0), 0), 0)
    gains = []
    for place in places.tolist():
        calls = calls_of_rank(facts[place])
        if calls is None:
            continue
        mine = matched.call[slice(*matched.firsts[place : place + 2].tolist())]
        numbers = np.where(calls.step >= 0, facts[place].devices[0].windows.numbers[calls.step], NOBODY)
        chosen = tells[mine] & np.isin(numbers, job.parts.numbers[steps])
        if chosen.any():
            gains.append(ahead[mine[chosen]].sum() / len(np.unique(numbers[chosen])))
    if not gains:  # no call shows it: use computing alone
        compute = job.parts.compute[:, steps].mean(axis=1)
        gains.append(max(compute[places].max() - np.delete(compute, places).max(initial=0.0), 0.0))
    return int(min(most, max(gains)))


LEAST = 0.04  # share of a rank's own work
LEAST_OF_STEP = 0.01
ALIKE = 0.02  # relative difference between kernel counts of ranks with equal work
EVERYTHING = "all computing"
SAME = 0.25  # ranks whose slowness differs by less than this share count as equally slow
CONTRIBUTES = 0.1  # share of a rank's computing, or of its excess: smaller classes are ignored


@dataclass(frozen=True)
class Straggler:
    """Straggler: one rank, ranks that are slow for the same reason, or all ranks of a stage or link."""

    ranks: tuple[int, ...]
    cause: (
        str  # "compute", "host" (issues its work late), "link" (moves data slowly), "stage" (has more work than others)
    )
    where: str  # the classes of kernels; the collective of a slow link; "" otherwise
    slower: float  # relative to its peers' computing or transfer; for "host", to the step
    since: int | None  # number of the first slow step; None: from the start
    extra: int  # nanoseconds per step above its peers
    costs: int  # nanoseconds that a step would be shorter, from `since` on
    stage: int | None = None
    host: str = ""  # the machine that has exactly these ranks, or ""


@dataclass(frozen=True)
class _One:
    """Slow rank, before ranks that are slow together are grouped."""

    place: int
    cause: str
    where: str
    slower: float
    since: int | None
    extra: float
    most: float  # maximum cost in nanoseconds


@dataclass(frozen=True)
class Stragglers:
    found: tuple[Straggler, ...]  # highest cost first
    step: int  # nanoseconds: the median step
    compared: tuple[tuple[int, ...], ...]  # groups of ranks with equal work that were compared

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that are slow themselves: not those of stages with more work."""
        return tuple(sorted({rank for one in self.found if one.cause in ("compute", "host") for rank in one.ranks}))


def stragglers(facts: Sequence[RankFacts], job: Across) -> Stragglers:
    """Compare ranks that do the same work.

    >>> from meshwright.traces.job.across import across
    >>> stragglers([], across([])).found
    ()
    """
    if not facts:
        return Stragglers((), 0, ())
    nothing = np.empty((0, len(CLASSES)), np.int64)
    spent = by_step(facts, [one.devices[0].by_class if one.devices else nothing for one in facts])
    times = by_step(facts, [one.devices[0].launched if one.devices else nothing for one in facts])
    lengths = job.parts.length[job.parts.present]
    step = int(np.median(lengths)) if len(lengths) else 0
    groups = [np.array(places) for places in _peers(times, job)]
    found: list[Straggler] = []
    for group in groups:
        steps = np.flatnonzero(job.parts.present[group].all(axis=0))
        if len(steps):
            slow_ones = _computing(job, group, steps, spent[np.ix_(group, steps)].astype(np.float64), step)
            found += _together(facts, job, steps, slow_ones + _hosts(job, group, steps, step))
    found += _stages(job, spent.sum(axis=2), step)
    found += [
        Straggler(link.ranks, "link", link.what, link.slower, None, link.extra, link.extra)
        for link in slow_links(facts, job.aligned)
        if link.extra >= LEAST_OF_STEP * step
    ]
    return Stragglers(
        found=tuple(sorted(found, key=lambda one: -one.costs)),
        step=step,
        compared=tuple(tuple(job.ranks[place] for place in group.tolist()) for group in groups),
    )


def _peers(times: Ints, job: Across) -> Iterator[list[int]]:
    """Yield places of ranks of the same stage that launch the same kernels equally often."""
    usual = np.median(times, axis=1) if times.size else np.zeros((len(times), len(CLASSES)))
    groups: list[list[int]] = []
    for place in np.flatnonzero(job.parts.present.any(axis=1)).tolist():
        for group in groups:
            other = usual[group[0]]
            near = np.abs(usual[place] - other) <= np.maximum(ALIKE * np.maximum(usual[place], other), 0.5)
            if job.pipeline.stage[place] == job.pipeline.stage[group[0]] and near.all():
                group.append(place)
                break
        else:
            groups.append([place])
    yield from (group for group in groups if len(group) > 1)


def _computing(job: Across, group: Ints, steps: Ints, spent: NDArray[np.float64], step: int) -> list[_One]:
    """Find ranks whose kernels take longer than those of their peers, in one class or in all."""
    over = np.stack([excess(spent[:, :, place]) for place in range(len(CLASSES))], axis=2)
    measured = [_relative(spent.sum(axis=2)), *(_relative(spent[:, :, place]) for place in range(len(CLASSES)))]
    found = []
    for rank in range(len(group)):
        sure = [seen for seen, more in measured if seen.sure[rank] and _extra(more, seen, rank) >= LEAST_OF_STEP * step]
        if not sure:
            continue
        since = int(sure[0].since[rank])
        extra = np.median(over[rank, since:], axis=0)
        where, slower, more = _where(extra, np.median((spent - over)[rank, since:], axis=0))
        number = int(job.parts.numbers[steps[since]]) if since else None
        found.append(_One(int(group[rank]), "compute", where, slower, number, more, more))
    return found


def _where(extra: NDArray[np.float64], usual: NDArray[np.float64]) -> tuple[str, float, float]:
    """Return the slow classes, relative to their usual time, and in nanoseconds.

    >>> _where(np.array([15.0, 0.1] + [0.0] * 9), np.array([100.0, 30.0] + [0.0] * 9))
    ('attention', 0.15, 15.0)
    >>> _where(np.array([15.0, 4.0] + [0.0] * 9), np.array([100.0, 30.0] + [0.0] * 9))[0]
    'all computing'
    """
    level = extra / np.maximum(usual, 1.0)
    counts = extra >= CONTRIBUTES * extra.max()
    slow_ones = counts & (level >= level[counts].max() / 2)
    large = usual >= CONTRIBUTES * usual.sum()
    everything = slow_ones[large].all() and large.sum() > 1
    chosen = np.ones(len(extra), np.bool_) if everything else slow_ones
    names = [CLASSES[place] for place in np.argsort(-extra) if slow_ones[place]]
    more = float(extra[chosen].sum())
    return EVERYTHING if everything else " and ".join(names), more / max(float(usual[chosen].sum()), 1.0), more


def _relative(values: NDArray[np.float64]) -> tuple[Slow, NDArray[np.float64]]:
    """Return ranks that are slow relative to their peers, and each rank's excess in nanoseconds in each step."""
    over = excess(values)
    return slow(over / np.maximum(values - over, 1.0), LEAST), over


def _extra(over: NDArray[np.float64], seen: Slow, rank: int) -> float:
    return float(np.median(over[rank, seen.since[rank] :]))


def _hosts(job: Across, group: Ints, steps: Ints, step: int) -> list[_One]:
    """Find ranks whose host issues work later than those of their peers, so that others wait for them."""
    steps = steps[:-1] if len(steps) > 1 else steps  # host delays after the last step were not recorded
    late = job.parts.host_bound[np.ix_(group, steps)].astype(np.float64)
    # all communication: the delay of a late rank is, on the others, computing that no longer overlaps with it
    parts = job.parts.waiting + job.parts.bubble + job.parts.transfer
    waits = parts[np.ix_(group, steps)].astype(np.float64)
    over = excess(late)
    seen = slow(over / max(step, 1), LEAST_OF_STEP)
    found = []
    for rank in np.flatnonzero(seen.sure).tolist():
        since, extra = int(seen.since[rank]), _extra(over, seen, rank)
        others = np.delete(waits[:, since:], rank, axis=0)
        missed = float(np.median(np.median(others, axis=0) - waits[rank, since:]))
        if missed >= LEAST_OF_STEP * step:
            number = int(job.parts.numbers[steps[since]]) if since else None
            level = float(seen.level[rank])
            found.append(_One(int(group[rank]), "host", "", level, number, extra, min(extra, missed)))
    return found


def _together(facts: Sequence[RankFacts], job: Across, steps: Ints, every: list[_One]) -> list[Straggler]:
    """Group ranks that are slow for the same reason: the same kind, amount, start and place."""
    groups: list[list[_One]] = []
    for one in sorted(every, key=lambda one: one.slower):
        for group in groups:
            other = group[0]  # the least slow
            same = (one.cause, one.where, one.since) == (other.cause, other.where, other.since)
            beside = facts[one.place].host == facts[other.place].host
            if same and beside and one.slower <= other.slower * (1 + SAME):
                group.append(one)
                break
        else:
            groups.append([one])
    return [_straggler(facts, job, steps, group) for group in groups]


def _straggler(facts: Sequence[RankFacts], job: Across, steps: Ints, group: list[_One]) -> Straggler:
    places = np.array(sorted(one.place for one in group))
    host = facts[places[0]].host
    alone = [place for place, one in enumerate(facts) if one.host == host] == places.tolist()
    since = group[0].since
    slow_steps = steps if since is None else steps[job.parts.numbers[steps] >= since]
    return Straggler(
        ranks=tuple(job.ranks[place] for place in places.tolist()),
        cause=group[0].cause,
        where=group[0].where,
        slower=float(np.mean([one.slower for one in group])),
        since=since,
        extra=int(np.mean([one.extra for one in group])),
        costs=costs_of(facts, job, places, slow_steps, max(one.most for one in group)),
        stage=job.pipeline.stage[places[0]],
        host=host if alone else "",
    )


def _stages(job: Across, spent: Ints, step: int) -> list[Straggler]:
    """Find stages whose ranks all compute longer than those of other stages: the model is divided unevenly."""
    stage = np.array([-1 if one is None else one for one in job.pipeline.stage])
    stage[~job.parts.present.any(axis=1)] = -1
    every = [np.flatnonzero(stage == number) for number in range(job.pipeline.stages)]
    if len(every) < 2 or not all(len(places) for places in every):
        return []
    steps = np.flatnonzero(job.parts.present[stage >= 0].all(axis=0))
    if not len(steps):
        return []
    values = np.array([np.median(spent[np.ix_(places, steps)], axis=0) for places in every])
    over = excess(values)
    share = over / np.maximum(values - over, 1.0)
    found = []
    for number in range(len(every)):
        tail = share[number]
        noise = float(np.median(np.abs(tail - np.median(tail)))) / len(tail) ** 0.5
        extra = float(np.median(over[number]))
        level = float(np.median(tail))
        if level >= max(LEAST, 10 * noise) and extra >= LEAST_OF_STEP * step:
            ranks = tuple(job.ranks[place] for place in every[number].tolist())
            found.append(Straggler(ranks, "stage", "", level, None, int(extra), int(extra), number))
    return found
