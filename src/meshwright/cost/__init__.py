"""What does a choice cost? Memory of any plan, and the timeline of any pipeline."""

from meshwright.cost.memory import fits, plan_memory
from meshwright.cost.pipeline import Event, Timeline, chrome_trace, simulate

__all__ = ["Event", "Timeline", "chrome_trace", "fits", "plan_memory", "simulate"]
