"""Comparison of a plan's prediction with measurements.

- `against_plan`: compare a plan's prediction with its run, and suggest what to do about the difference
- `predicted`: a plan's prediction in terms of traces
"""
