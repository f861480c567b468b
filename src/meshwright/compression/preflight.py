"""The front door of compression for the command line: what is wrong is said before PyTorch is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.plans import Job, Plan

Tell = Callable[[str, int, int], None]  # what is timed now, how much is done, of how much


def bench(names: list[str], mib: int | None, tell: Tell) -> dict[str, Any]:
    """How fast codecs are on this device, all of them where none is named."""
    from meshwright.compression.benchmark import measured

    return measured(names, mib, tell)


def grid(processes: int, mbit: float | None, latency: float, tell: Tell) -> dict[str, Any]:
    """What pays by size and bandwidth, and in detail at one bandwidth."""
    from meshwright.compression.planning.grid import explained

    return explained(processes, mbit, latency, tell)


def planned(job: Job, plan: Plan, runtime: str, link: tuple[float, float] | None, tell: Tell) -> tuple[Any, Plan]:
    """Which layers of a plan would be compressed, and the plan that says so."""
    from msgspec.structs import replace

    from meshwright.compression.auto.inputs import usual
    from meshwright.compression.planning.planned import planned as decided

    found = decided(job, plan, usual(), runtime, link, tell)
    return found, replace(plan, compression=found.compression)
