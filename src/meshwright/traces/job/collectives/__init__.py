"""Collectives over all their ranks: matched, and on one clock.

- `clocks`: offsets between the clocks of a job's machines
- `collectives`: every collective over all its ranks
- `matching`: match calls of different ranks that are the same collective or message
- `ordering`: number rows of millions of calls by several columns at once
"""
