"""`Cluster`: the hardware of a job, as groups of equal nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from meshwright.base.files import read_toml
from meshwright.clusters.device import Device, Group, Link
from meshwright.clusters.parsing import groups_of, parse_groups
from meshwright.errors import InputError, kind_of


@dataclass(frozen=True)
class Cluster:
    """Groups of nodes; devices are numbered through all groups, node by node.

    >>> cluster = Cluster.preset("2x8xa100-80gb+4x8xv100-32gb")
    >>> cluster.devices, cluster.device(0).name, cluster.device(47).name
    (48, 'a100-80gb', 'v100-32gb')
    >>> cluster.link(0, 7).kind, cluster.link(7, 8).kind
    ('nvlink', 'infiniband')
    """

    name: str
    groups: tuple[Group, ...]
    between: Link | None = None  # joins different groups; default: the slower of their networks
    # Reference to this cluster in a document: the string it was made from, or a table that rebuilds it.
    reference: str | Mapping[str, Any] = field(default="", compare=False, repr=False)

    @staticmethod
    def preset(text: str) -> Cluster:
        """Parse `local` or groups such as `8x8xh100` (nodes x devices per node x kind), joined by `+`."""
        if text == "local" or text.startswith("local:"):
            return _local(text)
        return Cluster(text, parse_groups(text), reference=text)

    @staticmethod
    def from_toml(path: str | Path) -> Cluster:
        """Read a TOML file; `docs/cluster.md` shows every field."""
        return Cluster.from_table(read_toml(path), file=str(path))

    @staticmethod
    def from_table(table: Mapping[str, Any], file: str = "") -> Cluster:
        """Return the cluster of a table with the fields of such a file."""
        if not isinstance(table, Mapping):
            raise InputError(f"holds {kind_of(table)}, expected a table", file=file)
        name, groups, between = groups_of(dict(table), file)
        label = name or Path(file).stem or "+".join(f"{g.nodes}x{g.devices_per_node}x{g.device.name}" for g in groups)
        return Cluster(label, groups, between, reference=_without_version(table) | {"name": label})

    @staticmethod
    def load(what: str | Path | Mapping[str, Any]) -> Cluster:
        """Return the cluster a user names: a string, the path of a TOML file, or a table."""
        if not isinstance(what, str | Path):
            return Cluster.from_table(what)
        if str(what).endswith(".toml") or os.path.isfile(what):
            return Cluster.from_toml(what)
        return Cluster.preset(str(what))

    @cached_property
    def devices(self) -> int:
        return sum(group.devices for group in self.groups)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return (0, *accumulate(group.devices for group in self.groups))

    def group_index(self, rank: int) -> int:
        """Return the index of the group that holds a device."""
        if not 0 <= rank < self.devices:
            raise InputError(f"device {rank} is not in {self.name}", valid=f"0 to {self.devices - 1}")
        return next(i for i, end in enumerate(self._starts[1:]) if rank < end)

    def first_rank(self, group: int) -> int:
        """Return the number of a group's first device."""
        return self._starts[group]

    def device(self, rank: int) -> Device:
        return self.groups[self.group_index(rank)].device

    def kinds(self, ranks: Sequence[int]) -> list[Device]:
        """Return the kinds of devices in a set of ranks, one per group."""
        low, high = min(ranks), max(ranks)
        if high - low + 1 == len(ranks):
            touched: Sequence[int] = range(self.group_index(low), self.group_index(high) + 1)
        else:
            touched = sorted({self.group_index(rank) for rank in ranks})
        return [self.groups[g].device for g in touched]

    def node(self, rank: int) -> tuple[int, int]:
        """Return (group, node inside the group) of a device."""
        index = self.group_index(rank)
        return index, (rank - self._starts[index]) // self.groups[index].devices_per_node

    def link(self, a: int, b: int) -> Link:
        """Return the fastest link that joins two different devices."""
        group_a, group_b = self.group_index(a), self.group_index(b)
        if group_a == group_b:
            start = self._starts[group_a]
            return self.groups[group_a].link(a - start, b - start)
        if self.between:
            return self.between
        return min((self.groups[g].network for g in (group_a, group_b)), key=lambda link: link.bandwidth)

    def __repr__(self) -> str:
        return f"Cluster({self.name}: {self.devices} devices)"


def _local(text: str) -> Cluster:
    """Return this machine for `local`; for `local:4` four of its devices, or four worker processes without any."""
    from meshwright.clusters.detect import detect

    wanted = text.partition(":")[2]
    if ":" in text and not (re.fullmatch(r"[0-9]{1,4}", wanted) and 1 <= int(wanted) <= 1024):
        raise InputError(f"'{text}' is not a local cluster", valid="local, or local:1 to local:1024")
    return detect(int(wanted) if wanted else 0).cluster


def _without_version(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table as plans hold it: they have a version of their own."""
    return {name: value for name, value in table.items() if name != "version"}
