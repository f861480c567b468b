"""Seconds of a layer: operators, collectives, placement of rank groups.

- `collectives`: seconds of a collective over the real topology
- `layer`: time of one layer under one strategy, or under thousands at once
- `layer_config`: configuration of a layer, or thousands of them at once
- `operators`: seconds of one operator on one device
- `passes`: a layer's forward and backward pass on one device
- `placement`: devices, links and framework of a stage
- `rank_groups`: devices of a stage that form the groups of an axis, and their number on each tier of links
- `stage`: time of one pipeline stage for one micro-batch
"""
