"""Dropout whose masks are a pure function of the run's seed, the step, the sample, the layer and the element.

No generator has a state. So the mask is the same under every plan, when a forward pass is recomputed, and after
resuming. 32-bit words come from Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), in
integer operations that give the same bits on every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.run.mesh.shards import Interval

_ROUNDS = 10
_FACTORS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_WORDS = 4  # words of one counter
_IN_CACHE, _IN_MEMORY = 2**16, 2**22  # counters per chunk


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return four random words for every counter of four words, as int64 from 0 to 2^32 - 1.

    The counter's words broadcast against each other. Products of two words wrap around in int64, which keeps the bits.

    >>> zero = torch.zeros((), dtype=torch.int64)
    >>> [f"{int(word):08x}" for word in philox([zero] * 4, (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    a, b, c, d = counter
    left, right = key
    for _ in range(_ROUNDS):
        first, second = a * _FACTORS[0], c * _FACTORS[1]
        a = ((second >> 32) ^ b).bitwise_xor_(left).bitwise_and_(_LOW)
        c = ((first >> 32) ^ d).bitwise_xor_(right).bitwise_and_(_LOW)
        b, d = second, first  # the upper halves are cut off at use
        left, right = (left + _KEY_STEPS[0]) & _LOW, (right + _KEY_STEPS[1]) & _LOW
    return a, b & _LOW, c, d & _LOW


@dataclass(frozen=True)
class Masks:
    """Masks of consecutive samples of a step."""

    seed: int  # of the run
    step: int
    first: int  # number of the first sample in the global batch

    def kept(self, site: str, rate: float, rows: Tensor, places: Tensor, columns: Sequence[Interval]) -> Tensor:
        """Return True for elements of (row, place, column) that are kept. Each is dropped with the probability `rate`.

        Rows number samples, or heads of samples, over the whole batch; places and columns are positions in the whole
        sample.

        >>> masks, row, columns = Masks(seed=0, step=0, first=0), torch.tensor([3]), [(0, 8)]
        >>> whole = masks.kept("embed", 0.5, row, torch.arange(4), columns)
        >>> part = masks.kept("embed", 0.5, row, torch.tensor([2, 3]), [(5, 8)])
        >>> torch.equal(part, whole[:, 2:, 5:])
        True
        """
        which, where = rows.repeat_interleave(len(places)), places.repeat(len(rows))
        found = [self._stay(site, round(rate * 2**32), which, where, low, high) for low, high in columns]
        every = found[0] if len(found) == 1 else torch.cat(found, dim=-1)
        return every.view(len(rows), len(places), -1)

    def _stay(self, site: str, below: int, rows: Tensor, places: Tensor, low: int, high: int) -> Tensor:
        """Return the mask of `kept` for pairs of a row and a place, some at a time. Four columns share a counter."""
        blocks = torch.arange(low // _WORDS, -(-high // _WORDS), device=places.device)
        step = torch.full((), self.step, dtype=torch.int64, device=places.device)
        found = torch.empty(len(places), len(blocks), _WORDS, dtype=torch.bool, device=places.device)
        each = max(1, (_IN_CACHE if places.device.type == "cpu" else _IN_MEMORY) // len(blocks))
        for first in range(0, len(places), each):
            some = slice(first, first + each)
            words = philox((blocks, places[some, None], rows[some, None], step), _key(self.seed, site))
            for i, word in enumerate(words):
                torch.ge(word, below, out=found[some, :, i])
        return found.flatten(1)[:, low % _WORDS :][:, : high - low]


def _key(seed: int, site: str) -> tuple[int, int]:
    """Return the two words of Philox's key for a run and a site."""
    digest = hashlib.blake2b(f"{seed} {site}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def dropped(x: Tensor, site: str, rate: float, masks: Masks, places: Tensor) -> Tensor:
    """Return (sample, token, channel) after dropout. The mask is kept for the backward pass, a byte per element."""
    rows = torch.arange(masks.first, masks.first + len(x), device=x.device)
    kept = masks.kept(site, rate, rows, places, [(0, x.shape[2])])
    return torch.where(kept, x * (1.0 / (1.0 - rate)), 0.0)
