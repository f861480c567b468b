"""Slow links: groups of ranks between which the same collective takes longer than between others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.traces.job.collective_table import label
from meshwright.traces.job.collectives.collectives import Aligned
from meshwright.traces.job.collectives.ordering import Ints, packed, runs
from meshwright.traces.job.stragglers.slow_ranks import SPREAD, SURE
from meshwright.traces.rank.collectives import KINDS
from meshwright.traces.rank.facts import RankFacts

LEAST = 0.2  # share of a transfer
ENOUGH = 3  # minimum comparable groups, and calls of each


@dataclass(frozen=True)
class SlowLink:
    """Ranks between which transfers are slow."""

    ranks: tuple[int, ...]
    what: str  # the collective
    slower: float  # relative to other ranks
    extra: int  # nanoseconds per step


def slow_links(facts: Sequence[RankFacts], aligned: Aligned) -> tuple[SlowLink, ...]:
    """Compare groups that move the same amount with the same collective.

    >>> from meshwright.traces.job.across import across
    >>> slow_links([], across([]).aligned)
    ()
    """
    matched = aligned.matched
    calls = np.flatnonzero(aligned.split)
    if not len(calls):
        return ()
    kind = np.zeros(len(matched.group), np.int64)
    kind[matched.call] = matched.kind
    sizes = np.zeros(len(matched.groups), np.int64)
    np.maximum.at(sizes, matched.group, matched.size)
    words = [label(group, int(size)) for group, size in zip(matched.groups, sizes, strict=True)]
    word = np.unique(words, return_inverse=True)[1].reshape(-1)[matched.group[calls]]
    what = runs(packed(word, kind[calls], matched.size[calls], runs(aligned.bytes[calls])[0]))[0]
    members = _members(aligned)[calls]
    steps = max((len(one.devices[0].windows.numbers) for one in facts if one.devices), default=1)
    found = []
    for same in np.split(np.argsort(what, kind="stable"), np.cumsum(np.bincount(what))[:-1]):
        one = calls[same[0]]
        title = f"{KINDS[kind[one]]} of {words[matched.group[one]]}"
        found += _outliers(aligned, calls[same], members[same], steps, title)
    return tuple(found)


def _members(aligned: Aligned) -> Ints:
    """Return a number per matched call that identifies its ranks: lowest and highest place, and count."""
    matched = aligned.matched
    low, high = np.full(len(matched.group), len(matched.ranks)), np.full(len(matched.group), -1)
    np.minimum.at(low, matched.call, matched.place)
    np.maximum.at(high, matched.call, matched.place)
    return packed(low, high, matched.size)


def _outliers(aligned: Aligned, calls: Ints, members: Ints, steps: int, title: str) -> list[SlowLink]:
    which, first, counts = runs(members)
    if len(first) < ENOUGH or counts.min() < ENOUGH:
        return []
    took = aligned.transfer[calls].astype(np.float64)
    usual = np.array([np.median(took[which == group]) for group in range(len(first))])
    middle = float(np.median(usual))
    spread = SPREAD * float(np.median(np.abs(usual - middle)))
    found = []
    for group in np.flatnonzero(usual - middle > max(LEAST * middle, SURE * spread, 1.0)).tolist():
        mine = took[which == group]
        noise = SPREAD * float(np.median(np.abs(mine - usual[group]))) / len(mine) ** 0.5
        if usual[group] - middle > SURE * noise:
            rows = np.flatnonzero(aligned.matched.call == calls[first[group]])
            ranks = tuple(aligned.matched.ranks[place] for place in aligned.matched.place[rows].tolist())
            extra = int((usual[group] - middle) * counts[group] / steps)
            found.append(SlowLink(ranks, title, float(usual[group] / max(middle, 1.0) - 1), extra))
    return found
