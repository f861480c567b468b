"""What does a choice cost? Time and memory of any plan, and the timeline of any pipeline.

`estimate` and what it is made of need numpy and are imported from their own modules: `cost.estimate`, `cost.layer`.
"""

from meshwright.cost.memory import fits, plan_memory
from meshwright.cost.pipeline import Event, Timeline, simulate
from meshwright.cost.runtime import RUNTIMES, Runtime, runtime

__all__ = ["RUNTIMES", "Event", "Runtime", "Timeline", "fits", "plan_memory", "runtime", "simulate"]
