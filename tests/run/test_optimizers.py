"""AdamW with 8-bit states beside PyTorch's in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.errors import InputError
from meshwright.run.optimizers import AdamW8bit, step_in_backward
from meshwright.run.optimizers.adamw import AdamW
from meshwright.run.optimizers.choose import optimizer_for
from meshwright.run.parallel.apply import apply
from tests.run.families import CONFIGS
from tests.run.parity import GROUPS, batches, plan_of
from tests.run.plans import FULL
from tests.run.pool import close_all, pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_it_follows_adam(dtype: torch.dtype, beta2: float) -> None:
    """Gradients over two decades inside a block, 60 steps: no bias, and errors small beside the way gone."""
    torch.manual_seed(0)
    start, sizes = torch.randn(20_000), 10 ** (2 * torch.rand(20_000) - 4)
    ours, theirs = (torch.nn.Parameter(start.to(kind, copy=True)) for kind in (dtype, torch.float32))
    steps = {"lr": 1e-3, "betas": (0.9, beta2), "weight_decay": 0.1}
    small, full = AdamW8bit([ours], **steps), torch.optim.AdamW([theirs], **steps)
    for _ in range(60):
        noise = sizes * (1 + torch.randn_like(sizes))
        ours.grad, theirs.grad = noise.to(dtype), noise
        small.step()
        full.step()
    moved, error = theirs.detach() - start, ours.detach().float() - theirs.detach()
    assert abs(float(error.mean())) < 0.02 * float(moved.abs().mean())
    if dtype == torch.float32:
        assert error.norm() < 0.1 * moved.norm()


def test_a_regression_is_solved_as_well() -> None:
    torch.manual_seed(1)
    x, truth = torch.randn(256, 32), torch.randn(32, 8)
    losses = []
    for kind in (AdamW8bit, torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.zeros(32, 8))
        optimizer = kind([weight], lr=0.1, weight_decay=0.0)
        for _ in range(100):
            optimizer.zero_grad()
            loss = (x @ weight - x @ truth).pow(2).mean()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] < max(2 * losses[1], 1e-2)


def test_steps_in_the_backward_pass_are_those_after_it() -> None:
    found = []
    for inside in (False, True):
        torch.manual_seed(2)
        layers = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Linear(300, 4))
        optimizer = AdamW8bit(layers.parameters(), lr=0.01)
        if inside:
            step_in_backward(optimizer)
        for _ in range(3):
            layers(torch.ones(2, 8)).sum().backward()
            if not inside:
                optimizer.step()
                optimizer.zero_grad()
            assert all(weight.grad is None for weight in layers.parameters())
        found.append([weight.detach().clone() for weight in layers.parameters()])
    for one, other in zip(*found, strict=True):  # states are rounded by chance, in another order
        torch.testing.assert_close(one, other, atol=2e-3, rtol=0)


def test_an_optimizer_that_is_gone_is_named() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    step_in_backward(AdamW8bit([weight]))
    with pytest.raises(InputError, match="is gone"):
        weight.sum().backward()


def test_moments_survive_a_checkpoint_to_the_last_code() -> None:
    """Written as float32, read into another optimizer: the same codes, scales and step."""
    torch.manual_seed(3)
    one, other = (torch.nn.Parameter(torch.randn(3, 300)) for _ in range(2))
    saved, loaded = AdamW8bit([one]), AdamW8bit([other])
    for _ in range(5):
        one.grad = torch.randn_like(one) * 10 ** (2 * torch.rand_like(one) - 4)
        saved.step()
    states = loaded.states(other)
    for name, tensor in saved.states(one).items():
        assert tensor.shape == one.shape, name
        states[name].copy_(tensor)
    loaded.restore(other, states, 5)
    assert loaded.state[other]["step"] == 5
    for expected, found in zip(saved.state[one]["moments"], loaded.state[other]["moments"], strict=True):
        assert torch.equal(expected, found)


def test_an_empty_shard_does_not_keep_the_others_from_their_step() -> None:
    ours, theirs = ([torch.nn.Parameter(torch.full(shape, 2.0)) for shape in ((0, 3), (4, 3))] for _ in range(2))
    for weight in (*ours, *theirs):
        weight.grad = torch.ones_like(weight)
    AdamW(ours, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1).step()
    torch.optim.AdamW(theirs, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1).step()
    torch.testing.assert_close(ours[1], theirs[1])


def weights_after(table: dict[str, Any], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Under 8-bit AdamW, in a process whose own chances are others than its peers'."""
    model, plan = plan_of(table, config)
    part = apply(model, plan, seed=7, groups=GROUPS, dtype=torch.bfloat16)
    torch.manual_seed(torch.distributed.get_rank())
    optimizer = optimizer_for("adamw-8bit", part, 1e-2, 0.1)
    for tokens, documents in batches("whole"):
        optimizer.zero_grad()
        part.step(part.micro_batches(tokens, documents), tokens.numel())
        optimizer.step()
    return {key: getattr(m, kind).detach() for span in part.spans for key, m, kind in span.decoder.named()}


@pytest.mark.parametrize(("table", "name"), [({"dp": 2, "zero": 0}, "llama"), ({"pp": 2}, "llama-tied")])
def test_copies_round_by_the_same_chances(table: dict[str, Any], name: str) -> None:
    one, other = pool(2).run(weights_after, table, CONFIGS[name])
    both = set(one) & set(other)
    assert "embed.tokens.weight" in both
    for key in both:
        assert torch.equal(one[key], other[key]), key


def test_copies_that_are_cut_differently_need_another_optimizer() -> None:
    with pytest.raises(AssertionError, match="would let copies of a parameter drift apart"):
        pool(4).run(weights_after, FULL["two pipelines, cut differently"][0], CONFIGS["llama"])
    close_all()
