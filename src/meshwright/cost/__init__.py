"""Cost model: time and memory of any plan, and the timeline of any pipeline.

Functions that price bytes or seconds need numpy, which is loaded on first use.
"""

from typing import TYPE_CHECKING, Any

from meshwright.cost.runtime import RUNTIMES, Runtime, runtime

if TYPE_CHECKING:
    from meshwright.cost.memory.device_memory import fits, plan_memory
    from meshwright.cost.step.pipeline import Event, Timeline, simulate

__all__ = ["RUNTIMES", "Event", "Runtime", "Timeline", "fits", "plan_memory", "runtime", "simulate"]


def __getattr__(name: str) -> Any:
    if name in {"fits", "plan_memory"}:
        from meshwright.cost.memory import device_memory

        return getattr(device_memory, name)
    if name in {"Event", "Timeline", "simulate"}:
        from meshwright.cost.step import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 'meshwright.cost' has no attribute '{name}'")
