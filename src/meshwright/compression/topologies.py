"""Names of the ways in which messages may travel; what each does is in `sync/topology.py`. Read without torch."""

TOPOLOGIES = ("gather", "scatter", "ring", "tree")
