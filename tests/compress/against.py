"""A batch compared with the meaning of its algorithm in float64, gradient by gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from meshwright.compress import codecs
from meshwright.compress.batch import Batch
from meshwright.compress.program import Program
from meshwright.compress.reference import decoded, encoded

NAMES = [name for name, codec in codecs().items() if codec.rounds == 1]
ALLOWED = 2e-4  # of the numbers may lie so near a boundary that another rounding of a statistic moves them over it


def drawn(count: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    """Numbers with a heavy tail, as gradients have it."""
    random = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, generator=random) * torch.exp(torch.randn(count, generator=random))
    return numbers.to(dtype).to(device)


def compare(batch: Batch, flat: Tensor, *, seed: int = 3, allowed: float = ALLOWED) -> None:
    """Messages, what they say, and residuals."""
    device = flat.device
    message, residual = batch.new_message(), (drawn(flat.numel(), torch.float32, str(device), 1) * 0.1)
    before = residual.clone()
    batch.encode(flat, message, residual=residual, seed=seed)
    out = torch.full_like(before, 7.0)
    batch.decode(message, out)
    assert not batch.flags(message).any()
    wanted = flat.float() + before
    scale = float(wanted.abs().max()) if len(wanted) else 1.0
    assert torch.allclose(out + residual, wanted, rtol=0, atol=2e-6 * scale), "the residual is what the message leaves"
    differ = 0
    for i in range(len(batch.counts)):
        differ += _differing(batch, i, message, out, wanted, seed)
    assert differ <= allowed * flat.numel(), f"{differ} of {flat.numel()} numbers differ"
    once = out.clone()
    batch.decode(message, out, add=True)
    assert torch.allclose(out, 2 * once, rtol=1e-6)
    _same_without_residual(batch, flat, wanted, message, seed, allowed)


def _differing(batch: Batch, i: int, message: Tensor, out: Tensor, wanted: Tensor, seed: int) -> int:
    """Numbers of one gradient for which the message of the reference says something else."""
    program: Program = batch.program
    part = slice(batch.starts[i], batch.starts[i + 1])
    count, numbers = batch.counts[i], wanted[part].double().cpu().numpy()  # the sum as float32 has it
    agreed = float(batch.agreed[i]) if program.agrees is not None else None
    mine = message[batch.places[i] : batch.places[i + 1]].cpu().numpy()
    found, peer = (out[part].double().cpu().numpy(), decoded(program, mine, count, agreed=agreed))
    top = np.abs(peer).max(initial=1e-30)
    assert np.allclose(found, peer, rtol=1e-6, atol=2e-7 * top), "a message says the same everywhere"
    expected, _ = encoded(program, numbers, seed=seed, agreed=agreed)
    said = decoded(program, expected, count, agreed=agreed)
    return int(np.count_nonzero(np.abs(found - said) > 1e-5 * np.abs(said) + 1e-6 * top))


def _same_without_residual(
    batch: Batch, flat: Tensor, wanted: Tensor, message: Tensor, seed: int, allowed: float
) -> None:
    if batch.dtype != torch.float32:
        return
    other = batch.new_message()
    batch.encode(wanted, other, seed=seed)
    one, two = torch.empty_like(wanted), torch.empty_like(wanted)
    batch.decode(message, one)
    batch.decode(other, two)
    assert int((one != two).sum()) <= allowed * flat.numel()


def bad_numbers_stay_alone(batch: Batch, flat: Tensor, bad: Sequence[tuple[int, float]]) -> None:
    """Only the gradients that have them are told of, and nothing that is not finite is said of any."""
    message = batch.new_message()
    batch.encode(flat, message, residual=torch.zeros_like(flat), seed=5)
    expected, found = torch.empty_like(flat), torch.empty_like(flat)
    batch.decode(message, expected)
    for which, value in bad:
        flat[batch.starts[which] + batch.counts[which] // 2] = value
    residual = torch.zeros_like(flat)
    batch.encode(flat, message, residual=residual, seed=5)
    batch.decode(message, found)
    wrong = {which for which, _ in bad}
    assert batch.flags(message).tolist() == [int(i in wrong) for i in range(len(batch.counts))]
    assert torch.isfinite(found).all()
    assert torch.isfinite(residual).all()
    for i in set(range(len(batch.counts))) - wrong:
        part = slice(batch.starts[i], batch.starts[i + 1])
        assert torch.equal(found[part], expected[part])
