"""Seconds of a layer: operators, collectives, placement of rank groups.

- `collectives`: seconds of a collective over the real topology
- `layer`: time of one layer under one strategy, or under thousands at once
- `layer_config`: one way to run a layer, or thousands of them at once
- `operators`: seconds of one operator on one device
- `passes`: a layer's forward and backward pass on one device
- `placement`: where a stage runs
- `rank_groups`: which devices of a stage form the groups of an axis, and how many of them each tier of links joins
- `stage`: time of one pipeline stage for one micro-batch
"""
