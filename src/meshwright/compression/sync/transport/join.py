"""Connect the ranks of a group: own process groups, the ranks of each node, and their hosts."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshwright.compression.sync.transport.agreement import alike, present
from meshwright.compression.sync.transport.failure import Witness, default_store
from meshwright.compression.sync.transport.wire import Traffic, Wire
from meshwright.errors import InputError


@dataclass(frozen=True)
class Wires:
    """Wires to all ranks, to those of this node, and to those of equal index in other nodes."""

    all: Wire
    inner: Wire
    outer: Wire

    def close(self) -> None:
        """Close the connections."""
        group = self.all.group
        if not dist.is_initialized():
            return  # all were closed at once
        # A part of the world names its group by its ranks: one made later would find the addresses of this one.
        if dist.get_world_size(group) == dist.get_world_size():
            dist.destroy_process_group(group)


def joined(group: Any, node: Any, limit: float, traffic: Traffic, wanted: str) -> tuple[Wires, Witness]:
    """Connect all ranks of a group at once; they must have `wanted` the same.

    Connections are our own: a lost one must not disturb others, and message tags must not collide.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    present(ranks, limit)
    few = len(ranks) < dist.get_world_size()
    ours = dist.new_group(ranks, timeout=timedelta(seconds=limit), backend="gloo", use_local_synchronization=few)
    size, rank = dist.get_world_size(ours), dist.get_rank(ours)
    told: list[Any] = [None] * size
    dist.all_gather_object(told, (socket.gethostname(), wanted), group=ours)
    names = [name for name, _ in told]
    alike([one for _, one in told], ranks, "choice")
    nodes = _nodes(ours, node)
    inside = next(node for node in nodes if rank in node)

    def wire(members: Sequence[int]) -> Wire:
        return Wire(ours, tuple(members), members.index(rank), limit, traffic)

    store = dist.PrefixStore(f"compress/{ours.group_name}", default_store())
    wires = Wires(wire(range(size)), wire(inside), wire([node[inside.index(rank)] for node in nodes]))
    return wires, Witness(store, rank, names, min(2.0, limit))


def _nodes(ours: Any, node: Any) -> list[tuple[int, ...]]:
    """Return the ranks of each node, in the order of their first ranks."""
    size, rank = dist.get_world_size(ours), dist.get_rank(ours)
    if isinstance(node, int):
        first = rank - rank % node
        mine = tuple(range(first, min(first + node, size)))
    else:
        mine = tuple(dist.get_group_rank(ours, one) for one in dist.get_process_group_ranks(node))
    found: list[Any] = [None] * size
    dist.all_gather_object(found, mine, group=ours)
    nodes = sorted(set(found))
    if sorted(one for node in nodes for one in node) != list(range(size)) or len(set(map(len, nodes))) > 1:
        raise InputError(f"makes nodes of ranks {nodes}", field="node", valid="nodes of one size that share no rank")
    return nodes
