"""Device time by part of the model: modules, annotations of the program, or functions of its Python code.

Forward work belongs to the innermost part that was open when it was issued. Backward work belongs to the part of its
forward call: an operator and its backward have the same sequence number, or a flow joins them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.distinct import distinct
from meshwright.traces.rank.issued import Issued
from meshwright.traces.rank.modules.backward import forwards_of
from meshwright.traces.rank.nesting import Nest, nest
from meshwright.traces.reading import Category, Trace

Ints = NDArray[np.int64]
MOST = 200  # maximum number of parts
MODULE = re.compile(r"nn\.Module: (.+)")
# Annotations of the profiler and of libraries.
NOT_A_PART = re.compile(r"ProfilerStep#|(?:nccl|gloo|mpi|ucc|rccl):|PyTorch Profiler")
LIBRARY = re.compile(
    r"^<|site-packages|dist-packages|(?:^|/)torch/|lib/python|^(?:threading|contextlib|runpy|functools)\.py"
)


@dataclass(frozen=True)
class Part:
    """One part of the model with all that is inside it.

    Times are nanoseconds of device work, concurrent pieces counted separately; of host operators if no device was
    recorded.
    """

    path: tuple[str, ...]  # from the outermost inwards
    calls: int
    forward: int
    backward: int
    share: float  # of all such work of the rank

    @property
    def depth(self) -> int:
        return len(self.path) - 1


@dataclass(frozen=True)
class Modules:
    """Parts in tree order, the largest first among siblings; those with the least work are left out."""

    source: str  # "modules", "annotations", "functions", "" without any
    parts: tuple[Part, ...]
    kinds: tuple[Part, ...]  # the same with modules of one class merged: Linear_3 and Linear_4 are Linear
    outside: int  # nanoseconds of device work that belong to no part


def modules_of(trace: Trace, work: Issued) -> Modules:
    """Return parts from the best source in a trace."""
    source, scopes, words = scopes_of(trace, work.threads)
    if not len(work.rows):
        work = _on_host(work)
    if not source or not len(work.rows):
        return Modules("", (), (), int(work.time.sum()))
    part, is_backward = _parts(trace, work, scopes)
    kinds = [kind_of(word) for word in words]
    held = part >= 0
    times = [
        np.bincount(part[held & flag], work.time[held & flag], minlength=len(scopes)).astype(np.float64)
        for flag in (~is_backward, is_backward)
    ]
    total = int(work.time.sum())
    parts = _tree(scopes, words, times, total)
    return Modules(source, parts, _tree(scopes, kinds, times, total), int(work.time[~held].sum()))


def _on_host(work: Issued) -> Issued:
    """Return each operator's own time on the host, if no device was recorded."""
    spans = work.operators
    return replace(
        work,
        rows=spans.rows,
        time=spans.alone(),
        thread=spans.thread,
        called=spans.starts,
        operator=np.arange(len(spans)),
    )


def kind_of(word: str) -> str:
    """Return a module's class, without the number of the instance.

    >>> kind_of("Linear_3")
    'Linear'
    """
    return re.sub(r"_\d+$", "", word)


def scopes_of(trace: Trace, threads: Ints) -> tuple[str, Nest, list[str]]:
    """Return the source of parts, their spans, and the name of each."""
    source, chosen, names = _scopes(trace)
    spans = nest(trace, chosen, threads)
    return source, spans, [names[int(number)] for number in trace.events.name[spans.rows]]


def _scopes(trace: Trace) -> tuple[str, Ints, dict[int, str]]:
    """Return the source of parts, the rows of their spans, and the name of each text number."""
    python = trace.complete(Category.PYTHON)
    named = distinct(trace.events.name[python])
    modules = {int(n): found[1] for n in named if (found := MODULE.match(trace.texts[n]))}
    noted = trace.complete(Category.ANNOTATION)
    marks = {int(n): trace.texts[n] for n in distinct(trace.events.name[noted]) if not NOT_A_PART.match(trace.texts[n])}
    if modules:
        names, rows = modules | marks, np.concatenate([python, noted])
        return "modules", rows[np.isin(trace.events.name[rows], list(names))], names
    if marks:
        return "annotations", noted[np.isin(trace.events.name[noted], list(marks))], marks
    functions = {int(n): trace.texts[n] for n in named if not LIBRARY.search(trace.texts[n])}
    chosen = python[np.isin(trace.events.name[python], list(functions))]
    return ("functions" if len(chosen) else ""), chosen, functions


def _parts(trace: Trace, work: Issued, scopes: Nest) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the innermost part of each piece of work, -1 for none, and True for backward work."""
    known = np.flatnonzero(work.called >= 0)
    part = np.full(len(work.rows), -1)
    part[known] = scopes.innermost(work.thread[known], work.called[known])
    begun, thread, time = forwards_of(trace, work)
    is_backward = begun >= 0
    there = np.flatnonzero(time >= 0)
    forward = np.full(len(work.rows), -1)
    forward[there] = scopes.innermost(thread[there], time[there])
    # A part entered inside the backward pass is recomputed: the work is its own.
    again = (part >= 0) & (scopes.starts[part] >= begun)
    use = is_backward & (forward >= 0) & ~again
    part[use] = forward[use]
    return part, is_backward


def _tree(scopes: Nest, words: list[str], times: list[NDArray[np.float64]], total: int) -> tuple[Part, ...]:
    """Merge spans with the same path into one part."""
    paths: dict[tuple[int, str], int] = {}
    above: list[int] = []
    of_span = np.zeros(len(scopes), np.int64)
    for place, (parent, word) in enumerate(zip(scopes.parent.tolist(), words, strict=True)):
        key = (int(of_span[parent]) if parent >= 0 else -1, word)
        if key not in paths:
            paths[key] = len(paths)
            above.append(key[0])
        of_span[place] = paths[key]
    sums = [np.bincount(of_span, time, minlength=len(paths)) for time in times]
    for path in range(len(paths) - 1, -1, -1):  # a part comes after the one around it
        if above[path] >= 0:
            for values in sums:
                values[above[path]] += values[path]
    calls = np.bincount(of_span, minlength=len(paths))
    weight = sums[0] + sums[1]
    least = np.sort(weight)[-MOST] if len(weight) > MOST else 0.0
    named: list[tuple[str, ...]] = []
    for around, word in paths:
        named.append((*named[around], word) if around >= 0 else (word,))
    kept = [path for path in range(len(paths)) if weight[path] > 0 and weight[path] >= least]
    order = {named[path]: (-weight[path], path) for path in range(len(paths))}
    kept.sort(key=lambda path: [order[named[path][: depth + 1]] for depth in range(len(named[path]))])
    return tuple(
        Part(named[path], int(calls[path]), int(sums[0][path]), int(sums[1][path]), float(weight[path] / max(total, 1)))
        for path in kept[:MOST]
    )
