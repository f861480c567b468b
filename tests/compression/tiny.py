"""Three small codecs and one that sums, in a few lines of torch each: synchronisation is tested without a compiler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def _halves(numbers: Tensor) -> Tensor:
    return numbers.half().float()


def _signs(numbers: Tensor) -> Tensor:
    return torch.where(numbers >= 0, 1.0, -1.0) * numbers.abs().mean()


def _top(numbers: Tensor) -> Tensor:
    kept = max(1, numbers.numel() // 4)
    found = torch.zeros_like(numbers)
    places = numbers.abs().topk(kept).indices
    found[places] = numbers[places]
    return found


SAID = {"exact": lambda numbers: numbers, "halves": _halves, "signs": _signs, "top": _top}


@dataclass(frozen=True)
class Facts:
    """What is asked of a codec's program."""

    sums: str = ""
    agrees: Any = None


@dataclass(frozen=True)
class Tiny:
    """A codec whose message is what it says, as float32 behind a flag for every gradient."""

    name: str
    rounds: int = 1
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    program: Facts = Facts()

    def batch(self, counts: tuple[int, ...], device: Any, dtype: torch.dtype) -> _Batch:
        return _Batch(counts, SAID[self.name])


class _Batch:
    def __init__(self, counts: tuple[int, ...], said: Any) -> None:
        self.counts, self.said = counts, said
        self.bytes = 4 * (len(counts) + sum(counts))

    def encode(self, flat: Tensor, message: Tensor, *, residual: Tensor | None = None, seed: int = 0) -> None:
        words = message.view(torch.float32)
        flags, values = words[: len(self.counts)], words[len(self.counts) :]
        kept = torch.zeros_like(flat) if residual is None else residual
        parts = zip(flat.split(self.counts), kept.split(self.counts), values.split(self.counts), strict=True)
        for i, (one, old, told) in enumerate(parts):
            bad = not bool(one.isfinite().all())
            flags[i] = float(bad)
            told.copy_(torch.zeros_like(one) if bad else self.said(one + old))
            if not bad:
                old.copy_(one + old - told)

    def decode(self, message: Tensor, out: Tensor, *, add: bool = False) -> None:
        values = message.view(torch.float32)[len(self.counts) :]
        out.copy_(out + values if add else values)

    def flags(self, message: Tensor) -> Tensor:
        return message.view(torch.float32)[: len(self.counts)]


@dataclass(frozen=True)
class Whole(Tiny):
    """Whole numbers on a scale that all agree on; messages are added as they are."""

    program: Facts = Facts("i32", agrees=True)

    def batch(self, counts: tuple[int, ...], device: Any, dtype: torch.dtype) -> _Whole:  # type: ignore[override]
        return _Whole(counts)


class _Whole:
    LEVELS = 1000

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts, self.bytes = counts, 4 * (len(counts) + sum(counts))
        self.agreed = torch.zeros(len(counts))

    def measure(self, flat: Tensor, *, residual: Tensor | None = None) -> None:
        seen = flat if residual is None else flat + residual
        self.agreed.copy_(torch.stack([one.abs().max() for one in seen.split(self.counts)]))

    def encode(self, flat: Tensor, message: Tensor, *, residual: Tensor, seed: int = 0, agreed: bool = False) -> None:
        assert agreed
        words = message.view(torch.int32)
        words[: len(self.counts)] = 0
        seen, scale = flat + residual, self._scale()
        words[len(self.counts) :] = (seen / scale).round().int()
        residual.copy_(seen - words[len(self.counts) :] * scale)

    def decode(self, message: Tensor, out: Tensor, *, add: bool = False) -> None:
        told = message.view(torch.int32)[len(self.counts) :] * self._scale()
        out.copy_(out + told if add else told)

    def flags(self, message: Tensor) -> Tensor:
        return message.view(torch.int32)[: len(self.counts)]

    def _scale(self) -> Tensor:
        return (self.agreed / self.LEVELS).repeat_interleave(torch.tensor(self.counts))
