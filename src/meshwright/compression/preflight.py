"""Entry point of compression for the command line: checks input before PyTorch is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.plans import Job, Plan

Tell = Callable[[str, int, int], None]  # name of the measurement, work done, work in all


def bench(names: list[str], mib: int | None, tell: Tell) -> dict[str, Any]:
    """Measure the speed of codecs on this device, by default of all."""
    from meshwright.compression.benchmark import measured

    return measured(names, mib, tell)


def grid(processes: int, mbit: float | None, latency: float, tell: Tell) -> dict[str, Any]:
    """Return decisions by size and bandwidth, and in detail at one bandwidth."""
    from meshwright.compression.planning.grid import explained

    return explained(processes, mbit, latency, tell)


def planned(job: Job, plan: Plan, runtime: str, link: tuple[float, float] | None, tell: Tell) -> tuple[Any, Plan]:
    """Return the decision on a plan's layers, and the plan with its rules."""
    from msgspec.structs import replace

    from meshwright.compression.auto.inputs import usual
    from meshwright.compression.planning.planned import planned as decided

    found = decided(job, plan, usual(), runtime, link, tell)
    return found, replace(plan, compression=found.compression)
