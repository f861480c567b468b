"""Time collectives between the ranks of a run on every tier of links, by bytes and group size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshwright.clusters.measurements import MeasuredLink
from meshwright.measurement.fitting import fitted
from meshwright.measurement.samples import Sample
from meshwright.measurement.timing import Timing
from meshwright.run.mesh.collectives import gather_tensor, scatter_tensor

_WAIT = timedelta(seconds=300)  # how long a group waits for a late rank
_ROUNDS = 9  # samples of every timing
_LASTS = 0.06  # minimum seconds of a sample: waiting processes are woken late
_MOST = 300  # maximum runs in one sample
KINDS = ("reduce", "gather", "scatter", "exchange", "send")


@dataclass(frozen=True)
class Tier:
    """Process groups that one kind of link joins, all of which communicate at the same time."""

    name: str  # inside nodes, between nodes
    groups: tuple[tuple[int, ...], ...]


def tiers(nodes: Sequence[int]) -> list[Tier]:
    """Return the tiers of ranks whose nodes are given: pairs and all ranks inside nodes, and one rank of each node.

    >>> [(tier.name, tier.groups) for tier in tiers([0, 0, 1, 1])]
    [('inside nodes', ((0, 1), (2, 3))), ('between nodes', ((0, 2), (1, 3)))]
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    each = min(len(ranks) for ranks in members.values())
    found = []
    for size in sorted({2, each} if each > 1 else set()):
        cut = tuple(tuple(r[i : i + size]) for r in members.values() for i in range(0, each // size * size, size))
        found.append(Tier("inside nodes", cut))
    if len(members) > 1:
        rails = tuple(tuple(ranks[i] for ranks in members.values()) for i in range(each))
        found.append(Tier("between nodes", rails))
    return found


def collectives(tier: Tier, device: str, sizes: Sequence[int]) -> Iterator[Sample]:
    """Time every kind of collective with every message size, in all groups of a tier at once."""
    me, mine = dist.get_rank(), None
    for group in tier.groups:
        made = dist.new_group(list(group), timeout=_WAIT)
        mine = (group, made) if me in group else mine
    for size in sizes:
        for kind in KINDS:
            run = _collective(kind, size // 4 // 64 * 64 or 64, *mine, device) if mine else lambda: None
            seconds = _between(run, device)
            members = len(tier.groups[0])
            facts = {"bytes": float(size), "members": float(members)}
            yield Sample(f"{tier.name}: {kind}", facts, seconds)


def _collective(kind: str, count: int, group: tuple[int, ...], made: Any, device: str) -> Callable[[], object]:
    """Return one collective of `count` four-byte numbers: the whole for all-gather and reduce-scatter."""
    members = len(group)
    count = -(-count // members) * members
    whole, part = torch.ones(count, device=device), torch.ones(count // members, device=device)
    if kind == "reduce":
        return lambda: dist.all_reduce(whole, group=made)
    if kind == "gather":
        return lambda: gather_tensor(whole, part, group=made)
    if kind == "scatter":
        return lambda: scatter_tensor(part, whole, group=made)
    if kind == "exchange":
        other = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(other, whole, group=made)
    at = group.index(dist.get_rank())
    if at >= members // 2 * 2:
        return lambda: None
    peer = group[at ^ 1]

    def send() -> None:
        work = dist.isend(whole, peer, group=made) if at % 2 == 0 else dist.irecv(whole, peer, group=made)
        if work is not None:
            work.wait()

    return send


def _between(run: Callable[[], object], device: str) -> Timing:
    """Time a collective between pieces of computation, as training runs it, and subtract the computation.

    Ranks that compute arrive a little late, and have lost caches and cores to others. All ranks begin at once and
    repeat for one sample; the slowest counts.
    """
    wide = 2048 if device.startswith("cuda") else 256
    a = torch.randn(16 * wide, wide, device=device)  # milliseconds, like the layers of small models
    b = torch.randn(wide, wide, device=device)

    def work() -> None:
        torch.mm(a, b)

    def both() -> None:
        work()
        run()

    count = max(1, min(_MOST, round(_LASTS / max(_slowest(both, 3, device), 1e-7))))
    _slowest(both, count, device)
    samples = [_slowest(both, count, device) - _slowest(work, count, device) for _ in range(_ROUNDS)]
    return Timing.of([max(seconds, 1e-6) for seconds in samples])


def _slowest(run: Callable[[], object], count: int, device: str) -> float:
    """Return the seconds of one run out of `count` in a row, on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    took = torch.tensor([(time.perf_counter() - start) / count], device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def link(samples: Sequence[Sample]) -> MeasuredLink:
    """Return the rates, the seconds per step and the start-up seconds that fit a tier's samples best."""
    moved, members = (np.array([sample.facts[name] for sample in samples]) for name in ("bytes", "members"))
    kind = np.array([KINDS.index(sample.kind.rpartition(" ")[2]) for sample in samples])
    kind = np.where(kind == 2, 1, np.where(kind > 2, kind - 1, kind))  # a reduce-scatter counts as an all-gather
    part, steps = (members - 1) / members, members - 1
    bytes_ = moved * np.choose(kind, [2 * part, part, part, np.ones_like(part)])
    waits = np.choose(kind, [2 * steps, steps, np.ones_like(steps), np.ones_like(steps)])
    starts = np.where(kind == 3, 0.0, 1.0)
    seen = [sample.timing.seconds for sample in samples]

    def curve(p: Sequence[float]) -> Any:
        return bytes_ / np.choose(kind, p[:4]) + waits * p[4] + starts * p[5]

    best = [max(bytes_[kind == k] / np.array(seen)[kind == k]) for k in range(4)]
    found = fitted(curve, seen, [*best, min(seen) / 2, min(seen) / 2], [1.0] * len(seen), rates=4)
    return MeasuredLink(*map(float, found))


def slowdown(device: str, work: Callable[[], object]) -> Timing:
    """Time by how much each second of an overlapped collective slows the computation."""

    whole = torch.ones(2**22 if device.startswith("cuda") else 2**19, device=device)
    samples = []
    for _ in range(_ROUNDS):
        times = []
        for computes, talks in ((True, False), (False, True), (True, True)):
            dist.barrier()
            start = time.perf_counter()
            pending = dist.all_reduce(whole, async_op=True) if talks else None
            if computes:
                work()
            if pending is not None:
                pending.wait()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        alone, talk, both = times
        samples.append(min(max((both - max(alone, talk)) / min(alone, talk), 0.01), 1.0))
    return Timing.of(samples)
