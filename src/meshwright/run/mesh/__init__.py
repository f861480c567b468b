"""The device mesh of a span: its process groups, shards and collectives.

- `collectives`: collectives that gradients pass through
- `mesh`: the position of a rank in the mesh of a span
- `shards`: the part of a whole tensor that a rank has
"""
