"""What does a choice cost? Memory of any plan, from the same numbers the planner and the runtime use."""

from meshwright.cost.memory import fits, plan_memory

__all__ = ["fits", "plan_memory"]
