"""Parameters that several spans hold: tied weights, and the same layers in several pipelines.

Copies may be cut differently. Every process takes from the others what overlaps its own piece, and adds in one order,
so that all copies stay equal to the last bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.run.mesh.mesh import local
from meshwright.run.mesh.shards import Box, inside, overlap
from meshwright.run.parallel.fsdp import no_gradient
from meshwright.run.parallel.stage import SpanPart

Number = tuple[int, int, int]  # of a span: pipeline, stage, span


@dataclass(frozen=True)
class Piece:
    """A box of a parameter that a process has as a part of one copy."""

    key: str
    span: Number
    rank: int
    box: Box


@dataclass(frozen=True)
class _Transfer:
    source: Piece
    target: Piece
    box: Box  # what both have


@dataclass(frozen=True)
class Own:
    """Place of a piece of this rank: the parameter, and the piece's index among its pieces."""

    span: SpanPart
    weight: Tensor
    place: int


class ReplicaSync:
    """The pieces of this process, and what other copies of the same parameters have of them."""

    def __init__(self, spans: Sequence[SpanPart], device: str) -> None:
        self.device = device  # what travels does so from there, wherever it is kept
        together = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.own: dict[Piece, Own] = {}
        for span in spans:
            for key, module, kind in span.decoder.named():
                weight = getattr(module, kind)
                for i, (box, _) in enumerate(span.layouts[key].pieces(weight.detach())):
                    self.own[Piece(key, span.number, self.rank, box)] = Own(span, weight, i)
        everyone = [list(self.own)]
        if together:
            everyone = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(everyone, list(self.own))
            # The first collective on the device: those between some processes only must not be it (NCCL).
            dist.all_reduce(torch.zeros(1, device=device))
        every = [piece for some in everyone for piece in some]
        self.standing = _standing(every)
        self.counted = {piece for piece in self.standing if piece.rank == self.rank}
        transfers = _transfers(every)
        self.cut_alike = all(one.source.box == one.target.box for one in transfers)
        self._transfers = [one for one in transfers if self.rank in (one.source.rank, one.target.rank)]
        for piece in {one.target for one in self._transfers if one.target.rank == self.rank}:
            weight = self.own[piece].weight
            if weight.requires_grad and not isinstance(weight, DTensor):  # copies step by the same sums
                weight.grad_dtype = torch.float32

    @property
    def keys(self) -> list[str]:
        """Names of all parameters of the model, in the order of the spans that hold them."""
        return list(dict.fromkeys(piece.key for piece in sorted(self.standing, key=lambda piece: piece.span)))

    def sum_gradients(self) -> None:
        """Every copy becomes the sum of all."""
        some = [one for one in self._transfers if self._trained(one)]
        if not some:
            return
        mine = {piece for one in some for piece in (one.source, one.target) if piece.rank == self.rank}
        grads = {piece: self._gradient(piece) for piece in self.own if piece in mine}
        work, arrived = [], {}
        for one in some:
            if one.source.rank != self.rank:
                arrived[one] = torch.empty([high - low for low, high in one.box], device=self.device)
                work.append(dist.P2POp(dist.irecv, arrived[one], one.source.rank))
                continue
            part = (
                grads[one.source][inside(one.source.box, one.box)]
                .to(self.device, torch.float32, copy=True)
                .contiguous()
            )
            if one.target.rank == self.rank:
                arrived[one] = part
            else:
                work.append(dist.P2POp(dist.isend, part, one.target.rank))
        for each in dist.batch_isend_irecv(work) if work else []:
            each.wait()
        self._add(grads, arrived)

    def _add(self, grads: dict[Piece, Tensor], arrived: dict[_Transfer, Tensor]) -> None:
        """In the order of the spans, in float32."""
        mine: dict[Piece, list[_Transfer]] = defaultdict(list)
        for one in arrived:
            mine[one.target].append(one)
        for target, terms in mine.items():
            total = torch.zeros(grads[target].shape, device=self.device)
            for span in sorted({target.span, *(one.source.span for one in terms)}):
                if span == target.span:
                    total += grads[target].to(self.device)
                for one in terms:
                    if one.source.span == span:
                        total[inside(target.box, one.box)] += arrived[one]
            grads[target].copy_(total)

    def _trained(self, one: _Transfer) -> bool:
        mine = one.source if one.source.rank == self.rank else one.target
        return bool(self.own[mine].weight.requires_grad)

    def _gradient(self, piece: Piece) -> Tensor:
        """A view of the gradient of an own piece."""
        own = self.own[piece]
        if own.weight.grad is None:
            own.weight.grad = no_gradient(own.weight)
        return list(own.span.layouts[piece.key].pieces(own.weight.grad))[own.place][1]

    def norm(self) -> Tensor:
        """Return the norm of the gradients of the whole model, every element counted once, on all ranks."""
        partly = {id(own.weight) for piece, own in self.own.items() if piece not in self.counted}
        found: dict[torch.device, list[Tensor]] = defaultdict(list)  # some may be on the host
        for piece, own in self.own.items():
            if piece in self.counted and own.weight.grad is not None:
                if id(own.weight) in partly:
                    found[own.weight.grad.device].append(self._gradient(piece))
                elif own.place == 0:
                    found[own.weight.grad.device].append(local(own.weight.grad))
        total = torch.zeros((), device=self.device)
        for grads in found.values():
            norms = torch._foreach_norm(grads, dtype=torch.float32)
            total += torch.stack(list(norms)).square().sum().to(total.device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total.sqrt()


def _standing(every: Sequence[Piece]) -> list[Piece]:
    """Pieces that stand for all equal ones, so that each element of the model is there once."""
    first: dict[tuple[str, Box], Piece] = {}
    span_of: dict[str, Number] = {}
    for piece in sorted(every, key=lambda piece: (piece.key, piece.span, piece.rank)):
        if span_of.setdefault(piece.key, piece.span) == piece.span:
            first.setdefault((piece.key, piece.box), piece)
    return list(first.values())


def _transfers(every: Sequence[Piece]) -> list[_Transfer]:
    """In the same order on all processes: for every piece, what other copies have of it."""
    spans: dict[str, set[Number]] = defaultdict(set)
    for piece in every:
        spans[piece.key].add(piece.span)
    several = [piece for piece in every if len(spans[piece.key]) > 1]
    holders: dict[tuple[str, Number], dict[Box, list[Piece]]] = defaultdict(lambda: defaultdict(list))
    for piece in several:
        holders[piece.key, piece.span][piece.box].append(piece)
    found = []
    for turn, target in enumerate(several):
        for span in sorted(spans[target.key] - {target.span}):
            for box, same in holders[target.key, span].items():
                common = overlap(box, target.box)
                if common:
                    near = [piece for piece in same if piece.rank == target.rank]
                    found.append(_Transfer(near[0] if near else same[turn % len(same)], target, common))
    return found
