"""Convert between FSDP2's grid (replicas x shards x ring) and ZeRO.

ZeRO-2 keeps gathered weights, ZeRO-3 drops them. Weights are cut over shards x ring: torchtitan 0.3.0
(distributed/parallel_dims.py) and Accelerate 1.15.0 (parallelism_config.py, dp_shard_cp) both fold context parallelism
into the group that FSDP shards over.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.frameworks.shared.nearest_plan import Draft


@dataclass(frozen=True)
class Grid:
    """Degrees of data parallelism in FSDP2."""

    replicate: int
    shard: int
    reshard: bool | None  # gathered weights are dropped after the forward pass; None: nothing is sharded


def grid_of(draft: Draft) -> Grid:
    """Return the grid of a plan; the draft changes what FSDP2 cannot shard."""
    draft.only_zero((0, 2, 3))
    strategy = draft.uniform.strategy
    dp, ring, replicas = strategy.dp, strategy.ring, strategy.dp * strategy.ring
    if strategy.zero == 0:
        if ring == 1:
            return Grid(dp, 1, None)
        group = ring if dp > 1 else 0
        draft.say("zero=0: FSDP shards over the devices of a ring (ZeRO-2)", zero=2, zero_group=group)
        return Grid(dp, 1, False)
    group = min(strategy.zero_group or replicas, replicas)
    if group == 1 and replicas > 1 and ring == 1:
        draft.say("zero_group=1: nothing is sharded", zero=0, zero_group=0)
        return Grid(dp, 1, None)
    if group % ring:
        draft.say(f"zero_group={group}: shards over the {ring} devices of a ring", zero_group=ring if dp > 1 else 0)
        group = ring
    elif strategy.zero_group == replicas:
        draft.set(zero_group=0)  # equal, as plans write it
    return Grid(replicas // group, group // ring, draft.uniform.strategy.zero == 3)


def zero_of(grid: Grid, ring: int) -> dict[str, int]:
    """Return ZeRO level and group of a grid.

    >>> zero_of(Grid(2, 4, True), ring=1)
    {'zero': 3, 'zero_group': 4}
    """
    group = grid.shard * ring
    if grid.reshard is None or (group == 1 and grid.replicate > 1):
        return {"zero": 0, "zero_group": 0}
    return {"zero": 3 if grid.reshard else 2, "zero_group": group if grid.replicate > 1 else 0}
