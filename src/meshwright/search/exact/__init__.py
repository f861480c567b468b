"""Exact search: shapes in the order of their bounds, every survivor simulated.

- `candidate_tables`: candidates in tables
- `evaluate`: the fastest choice of a shape that fits
- `local_search`: moves of a plan's cuts that make it faster
- `plan_builder`: plan document of a search result
- `solve`: the search
"""
