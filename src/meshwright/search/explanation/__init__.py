"""Explanation of a plan: its bottleneck, its best improvements, and comparison with other plans.

- `bottleneck`: the bottleneck of a plan, in one sentence with its number
- `compare`: two plans side by side
- `explain`: `explain(job, plan)`
- `features`: the choices of a plan, in short
- `html`: HTML pages of a plan and of a sweep
- `improvements`: changes with the largest gains
- `runners_up`: runners-up
- `sweep`: `sweep(...)`
- `time_breakdown`: the seconds of a step in a few groups
"""
