"""Find the forward call of backward work."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.rank.issued import Issued
from meshwright.traces.reading import NONE, Category, Trace

Ints = NDArray[np.int64]
ENGINE = "autograd::engine::evaluate_function"  # runs a backward operator, and accumulates its gradients


def forwards_of(trace: Trace, work: Issued) -> tuple[Ints, Ints, Ints]:
    """Return three arrays over pieces of work.

    - start of its backward operator; -1 for forward work
    - thread of the forward call; -1 if not recorded
    - time of the forward call; -1 if not recorded
    """
    thread, time = _by_sequence(trace, work)
    backward = thread != NONE
    by_flow = _by_flow(trace, work)
    fill = by_flow[0] >= 0
    thread[fill & (time < 0)], time[fill & (time < 0)] = by_flow[0][fill & (time < 0)], by_flow[1][fill & (time < 0)]
    backward |= fill
    thread[thread == NONE] = -1
    owner = _outward(work, backward)
    held = owner >= 0
    begun, found_thread, found_time = (np.full(len(work.rows), -1) for _ in range(3))
    begun[held] = work.operators.starts[owner[held]]
    found_thread[held], found_time[held] = thread[owner[held]], time[owner[held]]
    return begun, found_thread, found_time


def _by_sequence(trace: Trace, work: Issued) -> tuple[Ints, Ints]:
    """Return thread and start of the forward of each backward operator; thread NONE for others, time -1 for no forward.

    The operator that creates the graph's node increments the sequence number, and is the last to carry it. Each thread
    counts on its own: the forward is the last call with this number before the backward.
    """
    spans, told = work.operators, trace.operators
    place_of = np.full(len(trace.events), -1)
    place_of[spans.rows] = np.arange(len(spans))
    numbered = np.flatnonzero((told.sequence != NONE) & (told.sequence >= 0) & (place_of[told.row] >= 0))
    places, sequence = place_of[told.row[numbered]], told.sequence[numbered]
    is_backward = told.forward_thread[numbered] > 0
    thread, time = np.full(len(spans), NONE), np.full(len(spans), -1)
    thread[places[is_backward]] = -1
    if not is_backward.any() or is_backward.all():
        return thread, time
    ahead, back = places[~is_backward], places[is_backward]
    low = int(spans.starts.min())
    width = int(spans.starts.max()) - low + 1
    keys = sequence[~is_backward] * width + spans.starts[ahead] - low
    order = np.argsort(keys)
    wanted = sequence[is_backward] * width + spans.starts[back] - low
    near = np.searchsorted(keys[order], wanted) - 1
    found = np.where(near >= 0, order[near], 0)
    fits = (near >= 0) & (sequence[~is_backward][found] == sequence[is_backward])
    thread[back[fits]], time[back[fits]] = spans.thread[ahead[found[fits]]], spans.starts[ahead[found[fits]]]
    return thread, time


def _by_flow(trace: Trace, work: Issued) -> tuple[Ints, Ints]:
    """Return thread and start as `_by_sequence`, from flows between forward and backward operators; -1 for none."""
    events, spans = trace.events, work.operators
    thread, time = np.full(len(spans), -1), np.full(len(spans), -1)
    flows = np.flatnonzero(events.category == Category.BACKWARD_FLOW)
    starts, ends = (flows[events.phase[flows] == ord(letter)] for letter in "sf")
    if not len(starts) or not len(ends):
        return thread, time
    starts = starts[np.argsort(events.link[starts], kind="stable")]
    near = np.minimum(np.searchsorted(events.link[starts], events.link[ends]), len(starts) - 1)
    joined = events.link[starts[near]] == events.link[ends]
    starts, ends = starts[near[joined]], ends[joined]
    place = spans.innermost(work.threads[events.track[ends]], events.ts[ends])
    place, starts = place[place >= 0], starts[place >= 0]
    evaluates = np.array([text.startswith(ENGINE) for text in trace.texts], np.bool_)[events.name[spans.rows]]
    around = spans.parent[place]
    around[(around >= 0) & ~evaluates[around]] = -1
    for chosen, of in ((place, starts), (around[around >= 0], starts[around >= 0])):
        thread[chosen], time[chosen] = work.threads[events.track[of]], events.ts[of]
    return thread, time


def _outward(work: Issued, chosen: NDArray[np.bool_]) -> Ints:
    """Return the innermost chosen operator around each piece of work, -1 for none."""
    place = work.operator.copy()
    left = np.flatnonzero(place >= 0)
    while len(left := left[~chosen[place[left]]]):
        place[left] = work.operators.parent[place[left]]
        left = left[place[left] >= 0]
    return place
