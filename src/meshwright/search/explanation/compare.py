"""Compare two plans: their jobs and choices, their results, and the parts of their time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.base.units import size
from meshwright.cost.estimate import Estimate
from meshwright.search.explanation.features import choices
from meshwright.search.explanation.time_breakdown import Spending, differences, percent

_JOB = ("model", "cluster", "global_batch", "seq_len", "precision", "optimizer")


@dataclass(frozen=True)
class Row:
    """One fact of both plans."""

    name: str
    first: str
    second: str

    @property
    def same(self) -> bool:
        return self.first == self.second


@dataclass(frozen=True)
class TimeRow:
    """Seconds of one part of a step in both plans, and the change in parts of the first step (for equal tokens)."""

    name: str
    first: float
    second: float
    change: float


@dataclass(frozen=True)
class Comparison:
    """Comparison of two priced plans."""

    first: Estimate
    second: Estimate
    job: tuple[Row, ...]  # differences
    choices: tuple[Row, ...]
    reached: tuple[Row, ...]
    time: tuple[TimeRow, ...]  # where the second spends more, first

    @property
    def gain(self) -> float:
        """Tokens per second and device of the second over the first, less one."""
        return self.second.tokens_per_second_per_device / self.first.tokens_per_second_per_device - 1

    @property
    def verdict(self) -> str:
        """Verdict in one sentence."""
        if abs(self.gain) < 0.0005:
            return "both are equally fast per device"
        better, change = ("second", self.gain) if self.gain > 0 else ("first", 1 / (1 + self.gain) - 1)
        return f"the {better} trains {percent(change)} tokens per second and device"

    def to_table(self) -> dict[str, Any]:
        """Return the comparison as JSON knows it."""
        return {
            "verdict": self.verdict,
            "gain": self.gain,
            "job": [asdict(row) for row in self.job],
            "choices": [asdict(row) for row in self.choices],
            "first": _numbers(self.first),
            "second": _numbers(self.second),
            "time": [asdict(row) for row in self.time],
        }


def compare(first: Estimate, second: Estimate) -> Comparison:
    """Compare two priced plans; their frameworks may differ too."""
    parts = [Spending.of(found).parts for found in (first, second)]
    time = [TimeRow(n, parts[0].get(n, 0.0), parts[1].get(n, 0.0), part) for n, part in differences(first, second)]
    return Comparison(
        first, second, tuple(row for row in _jobs(first, second) if not row.same),
        tuple(row for row in _rows(choices(first.plan), choices(second.plan)) if not row.same),
        tuple(_rows(_reached(first), _reached(second))),
        tuple(row for row in time if row.first or row.second),
    )  # fmt: skip


def _rows(first: dict[str, str], second: dict[str, str]) -> list[Row]:
    return [Row(name, first[name], second[name]) for name in first]


def _jobs(first: Estimate, second: Estimate) -> list[Row]:
    facts = []
    for found in (first, second):
        job = found.job
        named = {"model": job.model.name, "cluster": job.cluster.name}
        facts.append({n: str(named.get(n) or getattr(job, n)) for n in _JOB} | {"runtime": found.runtime.name})
    return _rows(*facts)


def _reached(found: Estimate) -> dict[str, str]:
    worst = max(found.memory, key=lambda row: row.total / row.capacity)
    return {
        "step": f"{found.step_seconds:.4g} s",
        "tokens/s/device": f"{found.tokens_per_second_per_device:,.0f}",
        "MFU": f"{found.mfu:.1%}",
        "HFU": f"{found.hfu:.1%}",
        "memory": f"{size(worst.total)} of {size(worst.capacity)}" + ("" if found.fits else ", does not fit"),
    }


def _numbers(found: Estimate) -> dict[str, Any]:
    return {
        "step_time_s": found.step_seconds,
        "tokens_per_s_per_device": found.tokens_per_second_per_device,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "peak_memory_bytes": found.peak_memory,
        "fits": found.fits,
        "runtime": found.runtime.name,
        "choices": choices(found.plan),
    }
