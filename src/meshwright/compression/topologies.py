"""Names of topologies, which `sync/topology.py` implements. Needs no torch."""

TOPOLOGIES = ("gather", "scatter", "ring", "tree")
