"""Differences between two runs of a job, and their effect on a step.

Steps of a run vary without a cause, so only larger changes are reported. A quantity known for each step has its own
spread; a kernel has that of the kernels of its class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.rank.collectives import KINDS
from meshwright.traces.rank.facts import DeviceFacts, RankFacts
from meshwright.traces.rank.kernel_classes import CLASSES, kernel_class

Floats = NDArray[np.float64]
PARTS = ("compute", "exposed", "copies", "host_bound", "waiting")  # of Windows: they add up to the step
SIGMAS = 4.0  # standard errors that a change must exceed
ALONE = 0.02  # assumed uncertainty of a run with one step
LEAST = 0.001  # share of the step: smaller changes are not reported
MOST = 50  # rows per table


@dataclass(frozen=True)
class Change:
    """Change of one quantity between two runs: nanoseconds per step and rank, or bytes."""

    what: str  # "step", "part", "class", "collective", "kernel", "operator", "memory"
    name: str
    before: float
    after: float
    noise: float  # a change up to this is noise
    count_before: float = 0.0  # per step and rank, of countable quantities
    count_after: float = 0.0

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def verdict(self) -> str:
        """Verdict: new, gone, slower, faster, or more and less for bytes."""
        if self.what == "memory":
            return "more" if self.change > 0 else "less"
        if not self.before or not self.after:
            return "new" if self.after else "gone"
        return "slower" if self.change > 0 else "faster"


@dataclass(frozen=True)
class Difference:
    """Changes between two runs. Tables hold changes above the runs' own spread, largest first."""

    step: Change  # always reported
    parts: tuple[Change, ...]
    classes: tuple[Change, ...]
    collectives: tuple[Change, ...]
    kernels: tuple[Change, ...]
    operators: tuple[Change, ...]  # time on the host, without nested operators
    memory: tuple[Change, ...]
    steps: tuple[int, int]  # numbers of compared steps: fewer are less certain
    ranks: tuple[int, int]

    @property
    def changed(self) -> bool:
        return bool(self.parts or self.classes or self.collectives or self.kernels or self.operators or self.memory)


def difference(before: Sequence[RankFacts], after: Sequence[RankFacts]) -> Difference:
    """Return the changes between two runs; each must have ranks with work on devices or hosts.

    >>> from meshwright.traces.rank.facts import digest
    >>> from meshwright.traces.reading import read_trace
    >>> facts = digest(read_trace("tests/data/traces/hta/triton_example.json.gz"))
    >>> difference([facts], [facts]).changed
    False
    """
    runs = [[(rank, rank.devices[0]) for rank in run if rank.devices] for run in (before, after)]
    series = [_series([device for _, device in run]) for run in runs]
    step = _compared("step", "step", series)
    least = LEAST * max(step.before, step.after)

    def told(changes: list[Change], floor: float = least) -> tuple[Change, ...]:
        kept = [one for one in changes if abs(one.change) > max(one.noise, floor)]
        return tuple(sorted(kept, key=lambda one: (-abs(one.change), one.name))[:MOST])

    spread = [{name: _relative(run["class", name][0]) for name in CLASSES} for run in series]
    return Difference(
        step=step,
        parts=told([_compared("part", name, series) for name in PARTS]),
        classes=told([_compared("class", name, series) for name in CLASSES]),
        collectives=told([_compared("collective", name, series) for name in KINDS]),
        kernels=told(_named("kernel", runs, spread)),
        operators=told(_named("operator", runs, spread)),
        memory=told(_memory(runs), 0.0),
        steps=(_steps(runs[0]), _steps(runs[1])),
        ranks=(len(runs[0]), len(runs[1])),
    )


Run = Sequence[tuple[RankFacts, DeviceFacts]]


def _steps(run: Run) -> int:
    return max((len(device.windows.numbers) for _, device in run), default=0)


def _series(devices: Sequence[DeviceFacts]) -> dict[tuple[str, str], Floats]:
    """Return each quantity as [time and count, step], a mean over the ranks that have the step."""
    total: dict[tuple[str, str], list[Floats]] = defaultdict(list)
    steps = min((len(device.windows.numbers) for device in devices), default=0)
    for device in devices:
        total["step", "step"].append(_rows(device.windows.lengths[:steps]))
        for name in PARTS:
            total["part", name].append(_rows(getattr(device.windows, name)[:steps]))
        for place, name in enumerate(CLASSES):
            total["class", name].append(
                np.stack([device.by_class[:steps, place], device.launched[:steps, place]]).astype(np.float64)
            )
        calls = device.calls
        for place, name in enumerate(KINDS):
            mine = (calls.kind == place) & (calls.step >= 0) & (calls.step < steps)
            step = calls.step[mine]
            spent = np.bincount(step, (calls.end - calls.start)[mine], minlength=steps)
            total["collective", name].append(np.stack([spent, np.bincount(step, minlength=steps)]).astype(np.float64))
    return defaultdict(lambda: np.zeros((2, 0)), {key: np.mean(rows, axis=0) for key, rows in total.items()})


def _rows(values: NDArray[np.int64]) -> Floats:
    return np.stack([values, np.ones_like(values)]).astype(np.float64)


def _compared(what: str, name: str, series: list[dict[tuple[str, str], Floats]]) -> Change:
    """Return the change of medians over steps, and its noise from their spread."""
    rows = [run[what, name] for run in series]
    middle = [float(np.median(row[0])) if row.size else 0.0 for row in rows]
    counts = [float(np.median(row[1])) if row.size else 0.0 for row in rows]
    noise = hypot(*(_relative(row[0]) * value for row, value in zip(rows, middle, strict=True)))
    return Change(what, name, middle[0], middle[1], noise, counts[0], counts[1])


def _relative(values: Floats) -> float:
    """Return the relative uncertainty of the median of some steps."""
    middle = float(np.median(values)) if values.size else 0.0
    if len(values) < 3 or not middle:
        return ALONE
    spread = 1.4826 * float(np.median(np.abs(values - middle)))  # standard deviation of a normal distribution
    return float(SIGMAS * 1.2533 * spread / len(values) ** 0.5 / middle)  # standard error of the median


def _named(what: str, runs: list[list[tuple[RankFacts, DeviceFacts]]], spread: list[dict[str, float]]) -> list[Change]:
    """Return changes of kernels, or of operators by their own host time, by name."""
    found = [_totals(what, run) for run in runs]
    changes = []
    for name in found[0].keys() | found[1].keys():
        sides = [one.get(name, (0.0, 0.0)) for one in found]
        # Host time belongs to no kernel class, so the spread of all operators stands for it.
        kind = kernel_class(name) if what == "kernel" else ""
        parts = [one[kind] if kind else max(ALONE, *one.values()) for one in spread]
        noise = hypot(*(part * time for part, (time, _) in zip(parts, sides, strict=True)))
        changes.append(Change(what, name, sides[0][0], sides[1][0], noise, sides[0][1], sides[1][1]))
    return changes


def _totals(what: str, run: Run) -> dict[str, tuple[float, float]]:
    """Return (nanoseconds, count) per step and rank of each name."""
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for rank, device in run:
        per = 1 / max(len(device.windows.numbers), 1) / len(run)
        rows = (
            [(row.name, row.total, row.count) for row in rank.kernels]
            if what == "kernel"
            else [(row.name, row.alone, row.host.count) for row in rank.costs.table]
        )
        for name, time, count in rows:
            total[name][0] += time * per
            total[name][1] += count * per
    return {name: (time, count) for name, (time, count) in total.items()}


def _memory(runs: list[list[tuple[RankFacts, DeviceFacts]]]) -> list[Change]:
    """Return the change of peak memory on the rank with the highest peak."""
    peaks = [[rank.memory.allocated for rank, _ in run if rank.memory] for run in runs]
    if not all(peaks):
        return []
    return [Change("memory", "peak", float(max(peaks[0])), float(max(peaks[1])), 0.0)]
