"""Context of every layer beside its input: positions of tokens, their documents, and the mesh."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from meshwright.run.mesh.mesh import ONE, SpanMesh
from meshwright.run.mesh.shards import Interval
from meshwright.run.models.balance import Totals
from meshwright.run.models.dropout import Masks, dropped
from meshwright.run.models.rotary import Turns


@dataclass(frozen=True)
class Context:
    """Context of one micro-batch of (batch, sequence) tokens, of which a rank may have a part.

    >>> Context.of(torch.zeros(1, 4)).positions
    tensor([[0, 1, 2, 3]])
    """

    positions: Tensor  # (batch, own tokens)
    length: int  # tokens of a whole sample
    documents: Tensor | None = None  # (batch, sequence): document number, if several are packed
    mesh: SpanMesh = ONE
    divisor: float = 0.0  # of losses that layers add themselves; 0: none
    halved: bool = False  # the backward pass has two halves: input gradients, then weight gradients
    masks: Masks | None = None  # of dropout; None: no dropout
    whole: Totals | None = None  # routing of the step, if the balance loss covers the whole batch
    angles: dict[Turns, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)  # cached

    counted: set[str] = field(default_factory=set, compare=False, repr=False)  # layers whose experts' rows were counted
    routed: list[Tensor] = field(default_factory=list, compare=False, repr=False)
    bounds: list[Tensor] = field(default_factory=list, compare=False, repr=False)
    listed: list[list[list[int]]] = field(default_factory=list, compare=False, repr=False)

    @staticmethod
    def of(
        tokens: Tensor, documents: Tensor | None = None, mesh: SpanMesh = ONE, divisor: float = 0.0, *, halved: bool = False,
        masks: Masks | None = None, whole: Totals | None = None,
    ) -> Context:  # fmt: skip
        """Create the context of whole samples; positions count from the start of a sample, or of a document."""
        count = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
        if documents is not None:
            new = torch.ones_like(documents, dtype=torch.bool)
            new[:, 1:] = documents[:, 1:] != documents[:, :-1]
            count = count - torch.where(new, count, 0).cummax(dim=1).values
        return Context(mesh.own(count), tokens.shape[1], documents, mesh, divisor, halved, masks, whole)

    def places(self) -> Tensor:
        """Return the positions of the residual stream's own tokens in their samples, regardless of documents."""
        place = self.mesh.own(torch.arange(self.length, device=self.positions.device), dim=0)
        return place.chunk(self.mesh.tp.size)[self.mesh.tp.rank] if self.mesh.sp else place

    def dropped(self, x: Tensor, site: str, rate: float) -> Tensor:
        """Return (sample, token, channel) after dropout, to be added to the residual stream."""
        return dropped(x, site, rate, self.masks, self.places()) if rate and self.masks else x

    def keys(self, source: int) -> list[Interval]:
        """Return the positions of the keys that a rank in the ring has."""
        size = self.mesh.ring.size
        if size == 1:
            return [(0, self.length)]
        piece = self.length // (2 * size)
        return [(part * piece, (part + 1) * piece) for part in (source, 2 * size - 1 - source)]

    def samples_of_rows(self) -> Tensor:
        """Return the own sample of each row of a router; -1 for padding, which no loss or load counts.

        Where ranks of a tensor-parallel group have the same tokens, each routes some of them.
        """
        if not self.routed:
            mesh = self.mesh
            sample = torch.arange(len(self.positions), device=self.positions.device)[:, None].expand_as(self.positions)
            if self.documents is not None:
                sample = sample.where(mesh.own(self.documents) >= 0, -1)
            if mesh.sp:
                sample = sample.chunk(mesh.tp.size, dim=1)[mesh.tp.rank]
            flat, members = sample.flatten(), 1 if mesh.sp else mesh.tp.size
            flat = torch.nn.functional.pad(flat, (0, -len(flat) % members), value=-1)
            self.routed.append(flat.chunk(members)[0 if members == 1 else mesh.tp.rank])
        return self.routed[0]

    def sizes(self) -> tuple[Tensor, Tensor]:
        """Return each sample's number of tokens, and its number of tokens with a next one in their document."""
        if self.documents is None:
            tokens = torch.full((len(self.positions),), float(self.length), device=self.positions.device)
            return tokens, tokens - 1.0
        real = self.documents >= 0
        followed = (self.documents[:, 1:] == self.documents[:, :-1]) & real[:, 1:]
        return real.sum(dim=1).float(), followed.sum(dim=1).float()

    def turns(self, turns: Turns) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of (batch, own tokens, dim / 2) at the own positions."""
        if turns not in self.angles:
            angles = self.positions.unsqueeze(-1) * turns.inverse.to(self.positions.device)
            self.angles[turns] = angles.cos() * turns.scale, angles.sin() * turns.scale
        return self.angles[turns]

    def ends(self) -> Tensor:
        """Return document starts and the last end, over all samples in a row; cached."""
        if not self.bounds:
            place = torch.arange(self.positions.shape[0] * self.length, device=self.positions.device)
            new = place % self.length == 0
            if self.documents is not None:
                which = self.documents.flatten()
                new[1:] |= which[1:] != which[:-1]
            self.bounds.append(torch.cat([place[new], place[-1:] + 1]).to(torch.int32))
        return self.bounds[0]

    def documents_of_samples(self) -> list[list[int]] | None:
        """Return every sample's document starts and its last end, or None if samples are single documents."""
        if self.documents is None:
            return None
        if not self.listed:
            ends = self.ends().tolist()
            samples = range(self.positions.shape[0])
            spans = [(sample * self.length, (sample + 1) * self.length) for sample in samples]
            self.listed.append([[end - low for end in ends if low <= end <= high] for low, high in spans])
        return self.listed[0]

    def mask(self, window: int = 0, source: int | None = None) -> Tensor | None:
        """Return the mask (batch or 1, 1, query, key) of keys that a query sees, or None for plain causal attention.

        Keys are those of the rank itself, or of a `source` in its ring.
        """
        ring = self.mesh.ring
        if ring.size == 1 and self.documents is None and not window:
            return None
        mine = self.mesh
        theirs = mine if source is None else replace(mine, ring=replace(ring, rank=source))
        place = torch.arange(self.length, device=self.positions.device)[None]
        behind = mine.inside(place)[:, None, :, None] - theirs.inside(place)[:, None, None, :]
        seen = behind >= 0
        if window:
            seen = seen & (behind < window)
        if self.documents is not None:
            own, other = mine.inside(self.documents), theirs.inside(self.documents)
            seen = seen & (own[:, None, :, None] == other[:, None, None, :])
        return seen
