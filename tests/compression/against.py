"""A batch compared with the meaning of its algorithm in float64, gradient by gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from meshwright.compression import codecs
from meshwright.compression.backends.numpy.reference import decoded, encoded, measured
from meshwright.compression.batch import Batch
from meshwright.compression.program import Program

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


def bad_numbers_stay_alone(
    batch: Batch, flat: Tensor, bad: Sequence[tuple[int, float]], *, allowed: float = ALLOWED
) -> None:
    """Bad numbers in the middle of some gradients, bad residuals there and elsewhere: messages, flags and residuals are as
    the reference has them, and gradients without do not notice."""
    kept = drawn(flat.numel(), torch.float32, str(flat.device), 1) * 0.1
    message, expected = batch.new_message(), kept.clone()
    batch.encode(flat, message, residual=expected, seed=5)
    clean, wrong = message.clone(), {which for which, _ in bad}
    for turn, (which, value) in enumerate(bad):
        start, count = batch.starts[which], batch.counts[which]
        flat[start + count // 2] = value
        kept[start + count // 3] = -value
        if turn % 2 == 0:
            kept[start + count // 2] = value  # both are bad: for a residual of 0
    residual = kept.clone()
    batch.encode(flat, message, residual=residual, seed=5)
    assert batch.flags(message).tolist() == [int(i in wrong) for i in range(len(batch.counts))]
    assert torch.isfinite(residual).all()
    differ = sum(_differing_if_bad(batch, i, message, flat, kept, residual) for i in wrong)
    assert differ <= allowed * flat.numel(), f"{differ} of {flat.numel()} numbers differ"
    for i in set(range(len(batch.counts))) - wrong:
        part, place = slice(*batch.starts[i : i + 2]), slice(*batch.places[i : i + 2])
        assert torch.equal(residual[part], expected[part])
        assert torch.equal(message[place], clean[place])
    batch.encode(flat, message, seed=5)
    assert batch.flags(message).tolist() == [int(i in wrong) for i in range(len(batch.counts))]
    differ = sum(_differing_if_bad(batch, i, message, flat, None, None) for i in wrong)
    assert differ <= allowed * flat.numel(), f"{differ} of {flat.numel()} numbers differ without a residual"


def _differing_if_bad(
    batch: Batch, i: int, message: Tensor, flat: Tensor, kept: Tensor | None, left: Tensor | None
) -> int:
    """Numbers of one gradient of which the reference says something else, or leaves another residual."""
    program, part, count = batch.program, slice(*batch.starts[i : i + 2]), batch.counts[i]
    gradient, before = (None if one is None else one[part].cpu().numpy() for one in (flat, kept))
    assert gradient is not None
    agreed = None
    if program.agrees is not None:
        agreed = float(batch.agreed[i])
        assert np.isclose(agreed, measured(program, gradient, before), rtol=1e-6)
    said, rest = encoded(program, gradient, residual=before, seed=5, agreed=agreed)
    mine = message[slice(*batch.places[i : i + 2])].cpu().numpy()
    assert mine[:8].tolist() == said[:8].tolist(), "flags, and how many were chosen"
    found, wanted = (decoded(program, one, count, agreed=agreed) for one in (mine, said))
    top = np.abs(np.nan_to_num(gradient, nan=0, posinf=0, neginf=0)).max(initial=1e-30)
    apart = np.abs(found - wanted) > 1e-5 * np.abs(wanted) + 2e-6 * top
    if left is not None:
        assert rest is not None
        apart |= ~(np.abs(left[part].cpu().numpy() - rest) <= 4e-6 * top)
    return int(np.count_nonzero(apart))
