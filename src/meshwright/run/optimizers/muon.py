"""Muon (Jordan et al., 2024): orthogonalised momentum for every matrix of the blocks, AdamW for the rest.

An update needs the whole matrix, of which every rank may have a shard. Ranks that hold shards of one copy share the
work: each matrix has an owner. The others send it their shards, and it returns their parts of the result. Queries, keys
and values, gate and up, and every expert are separate matrices, even if one product computes several.

Updates are scaled by 0.2 sqrt(max(m, n)), so that learning rates and weight decay of AdamW fit (Liu et al., "Muon is
scalable", 2025).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.run.mesh.mesh import local
from meshwright.run.mesh.shards import Box, Interval, inside
from meshwright.run.models.attention.attention import GroupedAttention
from meshwright.run.models.feed_forward import FeedForward
from meshwright.run.models.mixture import Mixture
from meshwright.run.optimizers.adamw import AdamW
from meshwright.run.optimizers.offloaded_states import decaying, fresh_states
from meshwright.run.parallel.parallel_model import Parallel
from meshwright.run.parallel.replica_sync import Number, Own, Piece

MOMENTUM, STEPS = 0.95, 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # coefficients of the quintic that drives singular values towards 1
_AT_ONCE = 2**28  # elements in transfer together


def orthogonal(x: Tensor) -> Tensor:
    """Return nearly orthogonal matrices of the last two dimensions by Newton-Schulz steps, scaled as updates are.

    >>> found = orthogonal(torch.tensor([[3.0, 0.0], [0.0, 0.5]]))
    >>> bool((found.diag() / (0.2 * 2**0.5) - 1).abs().max() < 0.35)
    True
    """
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(STEPS):
        square = y @ y.mT
        y = a * y + (b * square + c * square @ square) @ y
    return 0.2 * max(x.shape[-2:]) ** 0.5 * (y.mT if tall else y)


@dataclass(frozen=True)
class _Unit:
    """One matrix, or experts that the same ranks hold: the boxes of each rank, and the owner."""

    key: str
    span: Number
    rows: Interval  # rows of the whole parameter; only experts are more than one unit
    holders: dict[Box, tuple[int, ...]]
    owner: int

    @property
    def box(self) -> Box:
        """Box of the unit in the whole parameter."""
        first = next(iter(self.holders))
        return (self.rows, *((0, max(box[dim][1] for box in self.holders)) for dim in range(1, len(first))))

    def sender(self, box: Box) -> int:
        """Return the rank that sends a box to the owner: the owner itself, if it has the box."""
        return self.owner if self.owner in self.holders[box] else self.holders[box][0]


class Muon:
    """Muon over all parameters that a rank trains; every rank of the plan steps together."""

    def __init__(self, part: Parallel, lr: float, weight_decay: float) -> None:
        self._device, self._rank = part.copies.device, part.copies.rank
        self._own = {piece: own for piece, own in part.copies.own.items() if _is_matrix(piece.key, own.weight)}
        self._matrices = list({id(own.weight): own.weight for own in self._own.values()}.values())
        self._parts = {piece.key: _parts(own, piece.key) for piece, own in self._own.items()}
        taken = set(map(id, self._matrices))
        rest = [weight for weight in part.parameters() if weight.requires_grad and id(weight) not in taken]
        self._rest = AdamW(decaying(rest, weight_decay), lr=lr) if rest else None
        self._group: dict[str, Any] = {"params": self._matrices, "lr": lr, "weight_decay": weight_decay, "step": 0}
        self.param_groups = [self._group, *(self._rest.param_groups if self._rest else [])]
        self.state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)
        self._units = list(_units(self._own, _gathered(self._own)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad = None

    def states(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the states of a parameter, in the shape of its local shard; create them if missing."""
        if self._rest and not any(weight is one for one in self._matrices):
            return self._rest.states(weight)
        state = self.state[weight]
        if not state:
            state.update(fresh_states(weight, ("momentum",)))
        return state

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters by their gradients."""
        if self._rest:
            self._rest.step()
        self._group["step"] += 1
        for weight in self._matrices:
            self.states(weight)["momentum"].lerp_(self._gradient(weight), 1 - MOMENTUM)
        for some in _rounds(self._units):
            results = self._exchanged(some)
            for piece, result in results.items():
                self._update(piece, result)
        for weight in self._matrices:
            if "master" in self.states(weight):
                local(weight.detach()).copy_(self.states(weight)["master"])

    def _gradient(self, weight: Tensor) -> Tensor:
        momentum = self.states(weight)["momentum"]
        if weight.grad is None:
            return torch.zeros_like(momentum)
        return local(weight.grad).to(momentum.device, torch.float32)

    def _direction(self, piece: Piece) -> Tensor:
        """Return the direction of an own piece: the gradient moved towards the momentum (Nesterov's)."""
        own = self._own[piece]
        ahead = self._gradient(own.weight).lerp(self.states(own.weight)["momentum"], MOMENTUM)
        view = list(own.span.layouts[piece.key].pieces(ahead, own.weight))[own.place][1]
        return view.to(self._device).contiguous()

    def _update(self, piece: Piece, result: Tensor) -> None:
        own = self._own[piece]
        value = self.states(own.weight).get("master", local(own.weight.detach()))
        view = list(own.span.layouts[piece.key].pieces(value, own.weight))[own.place][1]
        view.mul_(1 - self._group["lr"] * self._group["weight_decay"])
        view.sub_(result.to(view.device), alpha=self._group["lr"])

    def _exchanged(self, units: list[_Unit]) -> dict[Piece, Tensor]:
        """Return own pieces of orthogonal matrices, computed from all ranks' directions."""
        mine = {(piece.key, piece.span, piece.box): piece for piece in self._own}
        there, wholes, views = _Mail(self._rank), {}, []
        for unit in units:
            if unit.owner == self._rank:
                wholes[unit.key, unit.rows] = torch.empty([high - low for low, high in unit.box], device=self._device)
            for box in unit.holders:
                sender = unit.sender(box)
                part = self._direction(mine[unit.key, unit.span, box]) if sender == self._rank else None
                arrived = there.sent(part, sender, unit.owner, box, self._device)
                if arrived is not None:
                    views.append((wholes[unit.key, unit.rows][inside(unit.box, box)], arrived))
        there.wait()
        for view, arrived in views:
            view.copy_(arrived)
        back, found = _Mail(self._rank), {}
        for unit in units:
            whole = wholes.pop((unit.key, unit.rows), None)
            result = None if whole is None else self._orthogonal(unit.key, whole)
            for box, ranks in unit.holders.items():
                part = None if result is None else result[inside(unit.box, box)].contiguous()
                for rank in ranks:
                    arrived = back.sent(part, unit.owner, rank, box, self._device)
                    if arrived is not None:
                        found[mine[unit.key, unit.span, box]] = arrived
        back.wait()
        return found

    def _orthogonal(self, key: str, whole: Tensor) -> Tensor:
        """Orthogonalise every matrix of a parameter, in the type that matrix units are fast in."""
        kind = torch.bfloat16 if whole.is_cuda else torch.float32
        parts = whole.to(kind).split(self._parts[key], dim=-2)
        return torch.cat([orthogonal(part) for part in parts], dim=-2).float()


class _Mail:
    """Transfers between ranks that all run at once."""

    def __init__(self, rank: int) -> None:
        self._rank, self._work, self._kept = rank, list[Any](), list[Tensor]()

    def sent(self, part: Tensor | None, source: int, target: int, box: Box, device: str) -> Tensor | None:
        """Send or receive one part; return the tensor that this rank receives, filled once all transfers are done."""
        if source == target:
            return part if source == self._rank else None
        if source == self._rank:
            assert part is not None
            self._kept.append(part)
            self._work.append(dist.P2POp(dist.isend, part, target))
        elif target == self._rank:
            found = torch.empty([high - low for low, high in box], device=device)
            self._work.append(dist.P2POp(dist.irecv, found, source))
            return found
        return None

    def wait(self) -> None:
        for each in dist.batch_isend_irecv(self._work) if self._work else []:
            each.wait()


def _is_matrix(key: str, weight: Tensor) -> bool:
    return key.startswith("block.") and weight.dim() > 1 and weight.requires_grad


def _parts(own: Own, key: str) -> list[int]:
    """Return the rows of each matrix within one product."""
    whole = own.span.layouts[key].shape
    layer, name = next((n, key[len(n) + 1 :]) for n in own.span.decoder.names if key.startswith(f"{n}."))
    module: Any = own.span.decoder.layer(layer)
    if isinstance(module, GroupedAttention) and name == "qkv.weight":
        kv = module.shape.kv_heads * module.shape.head_dim
        return [whole[0] - 2 * kv, kv, kv]
    gated = (isinstance(module, FeedForward) and module.shape.gated and name == "up.weight") or (
        isinstance(module, Mixture) and name in ("experts.up", "shared_up.weight")
    )
    return [whole[-2] // 2] * 2 if gated else [whole[-2]]


def _gathered(own: Iterable[Piece]) -> list[Piece]:
    """Return the pieces of all ranks."""
    mine = list(own)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    every: list[list[Piece]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    return [piece for some in every for piece in some]


def _units(own: Iterable[Piece], every: Iterable[Piece]) -> Iterator[_Unit]:
    """Yield the units that this rank takes part in, in the same order on all ranks; owners get equal work."""
    spans = {piece.span for piece in own}
    found: dict[tuple[Number, str, Interval], dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for piece in sorted(every, key=lambda piece: (piece.span, piece.key, piece.box, piece.rank)):
        if piece.span in spans:
            rows = piece.box[0] if len(piece.box) == 3 else (0, 0)
            found[piece.span, piece.key, rows][piece.box].append(piece.rank)
    load: dict[tuple[Number, int], float] = defaultdict(float)
    for (span, key, rows), boxes in found.items():
        ranks = sorted({rank for some in boxes.values() for rank in some})
        owner = min((load[span, rank], rank) for rank in ranks)[1]
        most = max(box[0][1] for box in boxes)
        unit = _Unit(key, span, rows if rows[1] else (0, most), {b: tuple(r) for b, r in boxes.items()}, owner)
        sizes = [high - low for low, high in unit.box]
        load[span, owner] += prod(sizes) * min(sizes[-2:])  # Newton-Schulz: m^2 n for m <= n
        yield unit


def _rounds(units: list[_Unit]) -> Iterator[list[_Unit]]:
    """Yield few units at a time, so that their matrices fit beside training; each group is of one span and its ranks."""
    some, size = list[_Unit](), 0
    for unit in units:
        if some and unit.span != some[-1].span:
            yield some
            some, size = [], 0
        some.append(unit)
        size += prod(high - low for low, high in unit.box)
        if size >= _AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some
