"""Training and measuring on a Ray cluster.

- `driver`: train on a Ray cluster
- `measure`: measure the nodes of a Ray cluster and the links between them
- `rank`: one rank of a run, as a Ray actor
"""
