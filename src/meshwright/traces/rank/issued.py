"""Find the host operator that issued each piece of device work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.rank.nesting import Nest, nest, threads_of
from meshwright.traces.reading import NONE, Category, Trace

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Issued:
    """Work of all devices of a trace, with its origin on the host."""

    operators: Nest
    threads: Ints  # the number of each track's thread
    rows: Ints  # of kernels, copies and fills
    time: Ints  # nanoseconds of each
    thread: Ints  # thread that called the runtime for it, -1 if not recorded
    called: Ints  # time of that call
    operator: Ints  # index into `operators` of the innermost one around that call, -1 for none


def issued(trace: Trace) -> Issued:
    """Link work to its call by correlation, and the call to its operator by External id, else by time and thread.

    >>> from meshwright.traces.reading import read_trace
    >>> trace = read_trace("tests/data/traces/hta/triton_example.json.gz")
    >>> found = issued(trace)
    >>> [trace.texts[trace.events.name[found.operators.rows[place]]] for place in found.operator]
    ['triton_poi_fused_add_cos_sin_0']
    """
    events, threads = trace.events, threads_of(trace)
    operators = nest(trace, trace.complete(Category.OPERATOR), threads)
    rows = trace.complete(Category.KERNEL, Category.MEMCPY, Category.MEMSET)
    call = calls_for(trace, rows)
    known = call >= 0
    thread, called, place = (np.full(len(rows), -1) for _ in range(3))
    thread[known] = threads[events.track[call[known]]]
    called[known] = events.ts[call[known]]
    place[known] = operators.innermost(thread[known], called[known])
    told = _told(trace, operators, rows, call)
    # Old files write the correlation as the External id of calls that are linked to nothing; then time decides.
    by_id = (told >= 0) & ((place < 0) | (events.external[rows] != events.link[rows]))
    place[by_id] = told[by_id]
    return Issued(operators, threads, rows, events.dur[rows], thread, called, place)


def calls_for(trace: Trace, rows: Ints) -> Ints:
    """Return the row of the runtime call that launched each row of device work, -1 if not recorded."""
    events = trace.events
    calls = trace.complete(Category.RUNTIME, Category.DRIVER)
    calls = calls[events.link[calls] != NONE]
    return _match(events.link[calls], calls, events.link[rows])


def _told(trace: Trace, operators: Nest, rows: Ints, call: Ints) -> Ints:
    """Return the operator with the External id of some work, or of the call that launched it."""
    external = trace.events.external
    wanted = external[rows].copy()
    from_call = (wanted == NONE) & (call >= 0)
    wanted[from_call] = external[call[from_call]]
    named = np.flatnonzero(external[operators.rows] != NONE)
    found = _match(external[operators.rows[named]], named, wanted)
    found[wanted == NONE] = -1
    return found


def _match(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    """Return the value of the first key that equals each wanted one, -1 for none."""
    if not len(keys):
        return np.full(len(wanted), -1)
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    near = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[near] == wanted, values[order[near]], -1)
