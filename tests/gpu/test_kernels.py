"""Kernels on a CUDA device against the same formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from meshwright.run.kernels import gated, rms_norm, rms_norm_beside, split_turned, turned
from meshwright.run.kernels.cross_entropy import linear_loss
from meshwright.run.models import Context
from meshwright.run.models.attention.sequence_parallel import attend
from meshwright.run.optimizers import AdamW8bit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}  # of the norm of a difference; bfloat16 rounds at 2^-9
KINDS = list(TOLERANCE)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def compare(fast: Callable[..., Any], slow: Callable[..., Any], *inputs: Tensor) -> None:
    """Outputs and all gradients, for random gradients of the outputs."""
    wide = [one.detach().double().requires_grad_(one.requires_grad) for one in inputs]
    expected, found = slow(*wide), fast(*inputs)
    expected, found = ((one,) if isinstance(one, Tensor) else one for one in (expected, found))
    grads = [torch.randn_like(one) for one in found]
    torch.autograd.backward(found, grads)
    torch.autograd.backward(expected, [one.double() for one in grads])
    pairs = [
        *zip(found, expected, strict=True),
        *((one.grad, other.grad) for one, other in zip(inputs, wide, strict=True)),
    ]
    for one, other in pairs:
        if other is not None:
            error = (one.double() - other).norm() / other.norm()
            assert error < TOLERANCE[inputs[0].dtype], error


def norm64(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(dim=-1, keepdim=True) + 1e-5).rsqrt() * weight


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", [(3, 7, 64), (2, 129, 4096), (1, 5, 5000), (2, 9, 6, 128)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = drawn(*shape, dtype=dtype), drawn(shape[-1], dtype=dtype)
    compare(lambda x, w: rms_norm(x, w, 1e-5), norm64, x, weight)


@pytest.mark.parametrize("dtype", KINDS)
def test_rms_norm_beside_the_residual(dtype: torch.dtype) -> None:
    x, weight = drawn(2, 33, 2048, dtype=dtype), drawn(2048, dtype=dtype)
    compare(lambda x, w: rms_norm_beside(x, w, 1e-5), lambda x, w: (norm64(x, w), x.clone()), x, weight)


def test_rms_norm_of_heads_inside_a_wider_product() -> None:
    x, weight = drawn(2, 17, 12, 64), drawn(64)
    compare(lambda x, w: rms_norm(x[:, :, 2:7], w, 1e-5), lambda x, w: norm64(x[:, :, 2:7], w), x, weight)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("width", [48, 8192, 14336])
def test_gated(width: int, dtype: torch.dtype) -> None:
    def slow(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up

    compare(gated, slow, drawn(2, 19, 2 * width, dtype=dtype))


def turned64(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("heads", [(32, 8, 8), (3, 1, 1)])
def test_rotary_in_place_of_one_product(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    size, angles = 64, torch.rand(2, 21, 32, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()

    def slow(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = x.unflatten(-1, (-1, size)).split(heads, dim=2)
        return turned64(q, cos.double(), sin.double()), turned64(k, cos.double(), sin.double()), v.clone()

    x = drawn(2, 21, sum(heads) * size, dtype=dtype)
    compare(lambda x: split_turned(x * 1.0, cos, sin, heads, size), slow, x)
    compare(lambda x: turned(x, cos, sin), lambda x: turned64(x, cos.double(), sin.double()), drawn(2, 21, 5, 64))


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("vocab", [1000, 32064])
def test_chunked_loss(vocab: int, dtype: torch.dtype) -> None:
    hidden = (0.5 * torch.randn(2, 150, 256, device="cuda")).to(dtype).requires_grad_()
    weight = (0.1 * torch.randn(vocab, 256, device="cuda")).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (2, 150), device="cuda")
    targets[0, :7] = -100

    def slow(hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.cross_entropy((hidden @ weight.t()).flatten(0, 1), targets.flatten(), reduction="sum")

    compare(lambda h, w: linear_loss(h, w, targets, chunk=64).to(dtype), slow, hidden, weight)


@pytest.mark.parametrize("dtype", KINDS)
def test_adam_in_8_bits_follows_adam(dtype: torch.dtype) -> None:
    """The kernel's steps beside those of PyTorch's AdamW, for gradients over two decades inside a block."""
    start, sizes = torch.randn(300_001, device="cuda"), 10 ** (2 * torch.rand(300_001, device="cuda") - 4)
    ours, theirs = (torch.nn.Parameter(start.to(kind, copy=True)) for kind in (dtype, torch.float32))
    steps = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    small, full = AdamW8bit([ours], **steps), torch.optim.AdamW([theirs], **steps)
    for _ in range(30):
        noise = sizes * (1 + torch.randn_like(sizes))
        ours.grad, theirs.grad = noise.to(dtype), noise
        small.step()
        full.step()
    moved = theirs.detach() - start
    error = ours.detach().float() - theirs.detach()
    assert abs(float(error.mean())) < 0.02 * float(moved.abs().mean())
    if dtype == torch.float32:
        assert error.norm() < 0.1 * moved.norm()


@pytest.mark.parametrize("window", [0, 50])
def test_packed_documents_are_those_of_a_mask(window: int) -> None:
    """Attention over documents one behind the other, in bfloat16, against a mask in float32."""
    documents = (torch.rand(2, 200, device="cuda") < 0.05).cumsum(dim=1)
    context = Context.of(torch.zeros(2, 200, device="cuda"), documents)
    q, k, v = (drawn(2, 200, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
    wide = [one.detach().float().requires_grad_() for one in (q, k, v)]
    found, expected = attend(q, k, v, context, window), attend(*wide, context, window)
    grad = torch.randn_like(expected)
    found.backward(grad.bfloat16())
    expected.backward(grad)
    for one, other in [(found, expected), *((a.grad, b.grad) for a, b in zip((q, k, v), wide, strict=True))]:
        assert (one.float() - other).norm() < 0.01 * other.norm()
