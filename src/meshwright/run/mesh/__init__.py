"""The device mesh of a span: its process groups, shards and collectives.

- `collectives`: collectives that gradients pass through
- `mesh`: where a process stands in the grid of a span
- `shards`: which part of a whole tensor a process has
"""
