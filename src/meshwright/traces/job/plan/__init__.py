"""What the plan predicted beside what was measured.

- `against_plan`: what a plan promised beside what was measured, and what to do about the difference
- `predicted`: what a plan promised, in the words that traces are told in
"""
