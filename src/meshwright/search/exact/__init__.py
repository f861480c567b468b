"""The exact search: shapes in the order of their bounds, every survivor simulated.

- `candidate_tables`: candidates in tables
- `evaluate`: the fastest choice of a shape that fits
- `local_search`: move the cuts of a plan while that makes it faster
- `plan_builder`: from what the search found to the plan document
- `solve`: the search
"""
