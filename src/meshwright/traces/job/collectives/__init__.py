"""Collectives with all their ranks side by side: matched, on one clock.

- `clocks`: how far the clocks of a job's machines are apart
- `collectives`: every collective with all its ranks side by side
- `matching`: which calls of different ranks are the same collective or the same message
- `ordering`: numbering rows of millions of calls by several columns at once
"""
