"""Place the ranks of a run on the devices of its nodes.

A run numbers its ranks by the devices that its plan uses, in the cluster's order (`Plan.used`). A cluster numbers
devices node by node. So the ranks of a node are consecutive, whatever the plan leaves idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from meshwright.errors import shorten
from meshwright.plans import Job, Plan
from meshwright.plans.spans import device_text


@dataclass(frozen=True)
class Placed:
    """One rank, and its device: group of the cluster, node in the group, index in the node."""

    rank: int
    device: int  # as the plan numbers it
    group: int
    node: int
    local: int


@dataclass(frozen=True)
class Alike:
    """Consecutive nodes of one group on which the same devices are used: one request to a scheduler."""

    group: int
    nodes: int
    size: int  # devices on a node
    locals: tuple[int, ...]  # devices used on a node
    first_node: int  # index among all used nodes
    first_rank: int

    @property
    def per_node(self) -> int:
        """Ranks per node."""
        return len(self.locals)

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.nodes * self.per_node)

    @property
    def whole(self) -> bool:
        """Return True if every device of a node is used."""
        return self.per_node == self.size


def placement(job: Job, plan: Plan) -> tuple[Placed, ...]:
    """Return every rank of a run with its device, in the order of ranks.

    >>> import meshwright as mw
    >>> job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("1x2xa100-80gb+2x1xv100-32gb"), 4, seq_len=32,
    ...              precision="fp16")
    >>> plan = mw.Plan.of({"pp": 2, "stages": [{"layers": "embed..block.1", "devices": "0-1", "dp": 2},
    ...                                        {"layers": "block.2..head", "devices": "3", "dp": 1}]}, job)
    >>> [(p.rank, p.device, p.group, p.node, p.local) for p in placement(job, plan)]
    [(0, 0, 0, 0, 0), (1, 1, 0, 0, 1), (2, 3, 1, 1, 0)]
    """
    found = []
    for rank, device in enumerate(plan.used):
        group, node = job.cluster.node(device)
        inside = device - job.cluster.first_rank(group)
        found.append(Placed(rank, device, group, node, inside % job.cluster.groups[group].devices_per_node))
    return tuple(found)


def alike(job: Job, plan: Plan) -> tuple[Alike, ...]:
    """Return the used nodes in the order of ranks; nodes with equal requests are joined."""
    nodes: list[tuple[int, tuple[int, ...], int]] = []  # group, devices used, first rank
    for _, members in groupby(placement(job, plan), key=lambda placed: (placed.group, placed.node)):
        placed = tuple(members)
        nodes.append((placed[0].group, tuple(p.local for p in placed), placed[0].rank))
    found: list[Alike] = []
    at = 0
    for (group, used), same in groupby(nodes, key=lambda node: node[:2]):
        every = list(same)
        size = job.cluster.groups[group].devices_per_node
        found.append(Alike(group, len(every), size, used, at, every[0][2]))
        at += len(every)
    return tuple(found)


def in_words(job: Job, some: Alike) -> str:
    """Return one line about these nodes for people.

    >>> import meshwright as mw
    >>> job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("2x8xh100"), 12, seq_len=32)
    >>> [in_words(job, some) for some in alike(job, mw.Plan.of({"dp": 12}, job))]
    ['ranks 0-7: 1 node of 8 h100', 'ranks 8-11: 1 node of 8 h100, devices 0-3 of it']
    """
    kind = shorten(job.cluster.groups[some.group].device.name)
    ranks = f"ranks {some.ranks[0]}-{some.ranks[-1]}" if len(some.ranks) > 1 else f"rank {some.ranks[0]}"
    used = f"device{'s' * (some.per_node > 1)} {device_text(list(some.locals))}"
    part = "" if some.whole else f", {used} of {'it' if some.nodes == 1 else 'each'}"
    return f"{ranks}: {some.nodes} node{'s' * (some.nodes != 1)} of {some.size} {kind}{part}"
