"""Products in 8 bits against the same numbers in float64, and against PyTorch's own scaled product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import meshwright as mw
from meshwright.run.models import build
from meshwright.run.parallel.apply import apply
from meshwright.run.precision.matmul import linear, scaled
from meshwright.run.torch_private import scaled_mm
from tests.run.families import CONFIGS
from tests.run.parity import GROUPS, batches, optimizer_of, plan_of, world_of
from tests.run.pool import pool

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def drawn(*shape: int, seed: int = 0, wide: float = 2.0) -> Tensor:
    """Of many magnitudes."""
    stream = torch.Generator().manual_seed(seed)
    size = (wide * torch.randn(*shape, generator=stream)).exp()
    return torch.randn(*shape, generator=stream) * size


def by_hand(x: Tensor, mantissa: int, smallest: int, largest: float) -> Tensor:
    """x rounded to a floating-point type with one scale, in float64: nothing of PyTorch's own types."""
    x = x.double()
    scale = 2.0 ** (torch.frexp(x.abs().max() / largest).exponent)
    exponent = torch.frexp(x / scale).exponent - 1
    step = 2.0 ** (exponent.clamp(min=smallest) - mantissa)
    return torch.round(x / scale / step) * step * scale  # ties to even, as the types have it


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e20])
def test_values_are_rounded_once(size: float) -> None:
    x = drawn(64, 48, wide=3.0) * size
    for kind, mantissa, smallest, largest in ((E4M3, 3, -6, 448.0), (E5M2, 2, -14, 57344.0)):
        values, scale = scaled(x, kind)
        assert torch.equal(values.double() * scale.double(), by_hand(x, mantissa, smallest, largest))
        assert float(torch.frexp(scale).mantissa) == 0.5  # a power of two
    assert torch.equal(scaled(x.bfloat16(), E4M3).values.float(), scaled(x.bfloat16().float(), E4M3).values.float())


@pytest.mark.parametrize("shape", [(5, 7, 33), (2, 16, 64)])
def test_a_product_and_its_gradients(shape: tuple[int, ...]) -> None:
    x, weight = drawn(*shape, seed=1).requires_grad_(), drawn(24, shape[-1], seed=2).requires_grad_()
    bias, grad = drawn(24, seed=3), drawn(*shape[:-1], 24, seed=4)
    y = linear(x, weight, bias, "fp8")
    y.backward(grad)
    qx, qw, qg = (
        by_hand(x.detach().flatten(0, 1), 3, -6, 448.0), by_hand(weight.detach(), 3, -6, 448.0),
        by_hand(grad.flatten(0, 1), 2, -14, 57344.0),
    )  # fmt: skip
    expected = (qx @ qw.t() + bias).view_as(y), (qg @ qw).view_as(x), qg.t() @ qx
    for found, right in zip((y.detach(), x.grad, weight.grad), expected, strict=True):
        assert float((found - right).norm() / right.norm()) < 1e-6
    exact = functional.linear(x.detach().double(), weight.detach().double(), bias.double())
    assert 0.001 < float((y.detach() - exact).norm() / exact.norm()) < 0.06  # 2^-4 is half the distance of two numbers
    ours, theirs = scaled(x.detach().flatten(0, 1), E4M3), scaled(weight.detach(), E4M3)
    native = scaled_mm(ours.values, theirs.values.t(), ours.scale, theirs.scale, out_dtype=torch.float32)
    assert torch.allclose(native.view_as(y) + bias, y, rtol=1e-5, atol=1e-4)


def test_bfloat16_and_frozen_weights() -> None:
    x, weight = drawn(6, 32, seed=1).bfloat16().requires_grad_(), drawn(16, 32, seed=2).bfloat16()
    y = linear(x, weight, None, "fp8")
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    right = by_hand(x.detach(), 3, -6, 448.0) @ by_hand(weight, 3, -6, 448.0).t()
    assert float((y.detach() - right).norm() / right.norm()) < 4e-3
    assert weight.grad is None


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x, weight = torch.ones(2, 16, requires_grad=True), torch.ones(3, 16, requires_grad=True)
    assert not linear(torch.where(torch.arange(16) == 3, bad, x), weight, None, "fp8").isfinite().any()
    linear(x, weight, None, "fp8").backward(torch.full((2, 3), bad))
    assert not x.grad.isfinite().any()
    assert not weight.grad.isfinite().any()
    assert torch.equal(linear(torch.zeros(2, 16), weight, None, "fp8"), torch.zeros(2, 3))


def test_wider_and_narrower_types() -> None:
    x, weight, bias = drawn(4, 8), drawn(3, 8, seed=1), drawn(3, seed=2)
    assert torch.equal(linear(x, weight, bias, "fp32"), functional.linear(x, weight, bias))
    coarse = functional.linear(x.bfloat16(), weight.bfloat16()).float() + bias
    assert torch.equal(linear(x, weight, bias, "bf16"), coarse)
    narrow = x.bfloat16(), weight.bfloat16()
    assert torch.equal(linear(*narrow, None, "fp32"), functional.linear(*(t.float() for t in narrow)).bfloat16())


def test_a_model_learns_in_8_bits_as_in_32() -> None:
    losses: dict[str, list[float]] = {"": [], "fp8": []}
    for kind, found in losses.items():
        decoder = build(mw.Model.from_config(CONFIGS["llama"]))
        for _, product in decoder.products():
            product.computed_in = kind
        optimizer = optimizer_of(decoder.parameters())
        tokens = batches("whole")[0][0]
        for _ in range(12):
            optimizer.zero_grad()
            loss = functional.cross_entropy(decoder(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
    assert losses["fp8"] != losses[""]
    assert losses["fp8"] == pytest.approx(losses[""], rel=5e-3)
    assert losses["fp8"][-1] < losses["fp8"][0] - 0.2


def stepped(table: str, config: dict[str, Any]) -> tuple[float, float]:
    """Loss and norm of a step in 8 bits under a plan."""
    model, plan = plan_of(table, config)
    part = apply(model, plan, seed=7, groups=GROUPS)
    for product in part.products().values():
        product.computed_in = "fp8"
    tokens, documents = batches("packed")[0]
    loss = part.step(part.micro_batches(tokens, documents), tokens.numel()).loss
    return loss, float(part.copies.norm())


@pytest.mark.parametrize(
    ("plan", "same"),
    [("dp=2,zero=3", "dp=2"), ("pp=2,schedule=zero-bubble", "pp=2"), ("dp=2,zero=3,recompute=full", "dp=2")],
)
def test_plans_that_cut_no_product_find_the_same(plan: str, same: str) -> None:
    config = CONFIGS["llama-deep"]
    first, second = (pool(world_of(plan_of(text, config)[1])).run(stepped, text, config)[0] for text in (plan, same))
    assert first == pytest.approx(second, rel=1e-6)


def test_plans_that_cut_products_differ_by_rounding() -> None:
    config = CONFIGS["llama-deep"]
    cut, whole = (pool(world_of(plan_of(text, config)[1])).run(stepped, text, config)[0] for text in ("tp=2", "dp=1"))
    assert cut == pytest.approx(whole, rel=2e-2)


def test_a_job_in_8_bits_beside_one_in_16() -> None:
    """The plan of a device that has 8 bits, run by one that computes the same values in 16."""
    found = {}
    for precision in ("fp8", "bf16"):
        job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("1xh100"), 2, seq_len=32, precision=precision)
        events = mw.train(mw.Plan.of({"micro_batches": 1}, job), steps=4, lr=1e-3)
        found[precision] = [event["loss"] for event in events if event["event"] == "step"]
    assert found["fp8"] == pytest.approx(found["bf16"], rel=1e-2)
    assert found["fp8"] != found["bf16"]
