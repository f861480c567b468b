"""Blocks of attention by the kernels that rings use, merged, against float64."""

from __future__ import annotations

import pytest
import torch

from meshwright.run.models.attention.ring_attention import _merge
from meshwright.run.torch_private import flash_backward, flash_forward, packed_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("causal", [True, False])
def test_two_blocks_of_keys_are_one_attention(causal: bool) -> None:
    stream = torch.Generator("cuda").manual_seed(0)
    q, k, v, d_out = (
        torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, generator=stream) for _ in range(4)
    )
    exact = [part.double().requires_grad_() for part in (q, k, v)]
    scores = exact[0] @ exact[1].transpose(2, 3) / 8
    if causal:  # the second half of the queries sees the first keys whole, and its own by a mask
        scores = scores.masked_fill(~torch.ones(256, 256, dtype=torch.bool, device="cuda").tril(), -torch.inf)
    whole = scores.softmax(dim=-1) @ exact[2]
    whole.backward(d_out.double())
    blocks = [(slice(None), slice(0, 128), False), (slice(None), slice(128, 256), False)]
    if causal:
        blocks = [(slice(0, 128), slice(0, 128), True), (slice(128, 256), slice(0, 128), False)]
        blocks.append((slice(128, 256), slice(128, 256), True))
    out = torch.zeros(2, 4, 256, 64, device="cuda")
    total = torch.full((2, 4, 256), -torch.inf, device="cuda")
    for rows, keys, masked in blocks:
        parts = [part.contiguous() for part in (q[:, :, rows], k[:, :, keys], v[:, :, keys])]
        some, weight = flash_forward(*parts, masked, 0.125)
        _merge(out[:, :, rows], total[:, :, rows], some, weight)
    torch.testing.assert_close(out.double(), whole.detach(), atol=2e-2, rtol=2e-2)
    found = [torch.zeros_like(part, dtype=torch.float32) for part in (q, k, v)]
    for rows, keys, masked in blocks:
        parts = [part.contiguous() for part in (d_out[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys])]
        ends = [out[:, :, rows].to(q.dtype).contiguous(), total[:, :, rows].contiguous()]
        for target, where, grad in zip(
            found, (rows, keys, keys), flash_backward(*parts, *ends, masked, 0.125), strict=True
        ):
            target[:, :, where] += grad
    for grad, part in zip(found, exact, strict=True):
        assert part.grad is not None
        torch.testing.assert_close(grad.double(), part.grad, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize(("key_heads", "width"), [(4, 64), (2, 64), (4, 48)])
def test_packed_documents(key_heads: int, width: int) -> None:
    """Shared heads of keys, and values narrower than keys, as latent attention has them."""
    stream = torch.Generator("cuda").manual_seed(0)
    sizes = ((4, 64), (key_heads, 64), (key_heads, width))
    q, k, v = (torch.randn(300, *s, device="cuda", dtype=torch.bfloat16, generator=stream) for s in sizes)
    ends = torch.tensor([0, 100, 130, 300], device="cuda", dtype=torch.int32)
    found = packed_attention(q, k, v, ends, 170, None, (-1, 0))
    for low, high in ((0, 100), (100, 130), (130, 300)):
        one, keys, values = (part[low:high].double().transpose(0, 1) for part in (q, k, v))
        keys, values = (part.repeat_interleave(4 // key_heads, dim=0) for part in (keys, values))
        scores = one @ keys.transpose(1, 2) / 8
        scores = scores.masked_fill(
            ~torch.ones(high - low, high - low, dtype=torch.bool, device="cuda").tril(), -torch.inf
        )
        exact = (scores.softmax(dim=-1) @ values).transpose(0, 1)
        torch.testing.assert_close(found[low:high].double(), exact, atol=2e-2, rtol=2e-2)
