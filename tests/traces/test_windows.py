"""Steps and their parts against a count of every nanosecond."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.traces.rank.device_activity import COMMUNICATES, COMPUTE, COPIES, Work
from meshwright.traces.rank.intervals import before, gaps, union
from meshwright.traces.rank.timeline.steps import Span
from meshwright.traces.rank.timeline.windows import windows
from meshwright.traces.reading import NONE

PIECES = st.lists(
    st.tuples(
        st.integers(0, 60),  # start
        st.integers(0, 15),  # length
        st.sampled_from([COMPUTE, COMMUNICATES, COPIES]),
        st.one_of(st.none(), st.integers(0, 30)),  # how long before its start the call began
        st.integers(0, 10),  # how long that call took
    ),
    min_size=1,
    max_size=12,
)
STEPS = st.lists(st.integers(-5, 80), min_size=2, max_size=4, unique=True).map(sorted)


def work_of(pieces: list[tuple[int, int, int, int | None, int]]) -> Work:
    pieces = sorted(pieces, key=lambda piece: piece[0])
    starts = np.array([piece[0] for piece in pieces])
    launch = np.array([NONE if piece[3] is None else piece[0] - piece[3] for piece in pieces])
    issued = np.array([NONE if piece[3] is None else piece[0] - piece[3] + piece[4] for piece in pieces])
    ends = starts + np.array([piece[1] for piece in pieces])
    return Work(0, np.arange(len(pieces)), starts, ends, np.array([piece[2] for piece in pieces]), launch, issued)


@settings(deadline=None)  # a busy machine is no failure
@given(PIECES, st.one_of(st.just([]), STEPS))
def test_every_nanosecond_is_one_part_of_one_step(
    pieces: list[tuple[int, int, int, int | None, int]], marks: list[int]
) -> None:
    work = work_of(pieces)
    steps = tuple(Span(number, start, end - 1) for number, (start, end) in enumerate(pairwise(marks)))
    found, member = windows(work, steps)
    launched = [
        piece if at == NONE else at for piece, at in zip(work.starts.tolist(), work.launch.tolist(), strict=True)
    ]
    inside = [next((s.number for s in steps if s.start <= at <= s.end), -1) for at in launched]
    if steps and max(inside) >= 0:
        assert [int(found.numbers[place]) if place >= 0 else -1 for place in member] == inside
        assert found.outside == inside.count(-1)
    counted = {
        name: np.zeros(len(found.numbers), int) for name in ("compute", "exposed", "copies", "hidden", "idle", "late")
    }
    for now in range(int(found.edges[0]), int(found.edges[-1])):
        step = max(place for place, edge in enumerate(found.edges[:-1]) if edge <= now)
        running = {
            int(kind) for start, end, kind in zip(work.starts, work.ends, work.kind, strict=True) if start <= now < end
        }
        if COMPUTE in running:
            counted["compute"][step] += 1
            counted["hidden"][step] += COMMUNICATES in running
        elif COMMUNICATES in running:
            counted["exposed"][step] += 1
        elif COPIES in running:
            counted["copies"][step] += 1
        else:
            counted["idle"][step] += 1
            counted["late"][step] += late(work, now)
    for name in ("compute", "exposed", "copies", "hidden", "idle"):
        assert getattr(found, name).tolist() == counted[name].tolist(), name
    assert found.host_bound.tolist() == counted["late"].tolist()
    assert (found.compute + found.exposed + found.copies + found.idle).tolist() == found.lengths.tolist()


def late(work: Work, now: int) -> bool:
    """Whether the host had, at an idle moment, not issued what runs next."""
    follows = int(np.flatnonzero(work.starts > now)[0])
    since = max([int(end) for end in work.ends if end <= now], default=-1000)
    launch, issued = int(work.launch[follows]), int(work.issued[follows])
    return launch != NONE and launch > since and now < issued


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=8), st.lists(st.integers(-5, 60), max_size=5)
)
def test_length_before_times_and_gaps(spans: list[tuple[int, int]], times: list[int]) -> None:
    starts = np.array([start for start, _ in spans], np.int64)
    merged = union(starts, starts + np.array([length for _, length in spans], np.int64))
    covered = {now for start, length in spans for now in range(start, start + length)}
    assert before(merged, np.array(times, np.int64)).tolist() == [sum(now < t for now in covered) for t in times]
    begins, ends = gaps(merged, 3, 37)
    assert {n for b, e in zip(begins, ends, strict=True) for n in range(b, e)} == set(range(3, 37)) - covered
