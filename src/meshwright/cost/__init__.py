"""Cost model: time and memory of any plan, and the timeline of any pipeline.

Functions that price bytes or seconds need numpy, which is loaded on first use.
"""

from typing import TYPE_CHECKING, Any

from meshwright.cost.runtime import RUNTIMES, Runtime, runtime
from meshwright.cost.step.pipeline import Event, Timeline, simulate

if TYPE_CHECKING:
    from meshwright.cost.memory.device_memory import fits, plan_memory

__all__ = ["RUNTIMES", "Event", "Runtime", "Timeline", "fits", "plan_memory", "runtime", "simulate"]


def __getattr__(name: str) -> Any:
    if name in {"fits", "plan_memory"}:
        from meshwright.cost.memory import device_memory

        return getattr(device_memory, name)
    raise AttributeError(f"module 'meshwright.cost' has no attribute '{name}'")
