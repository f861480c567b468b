"""Training and measuring on a cluster of Ray.

- `driver`: train on a cluster of Ray
- `measure`: measure the nodes of a cluster of Ray and the links between them
- `rank`: one process of a run, as an actor of Ray
"""
