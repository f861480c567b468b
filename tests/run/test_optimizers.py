"""AdamW with 8-bit states beside PyTorch's in float32."""

from __future__ import annotations

import pytest
import torch

from meshwright.errors import InputError
from meshwright.run.optimizers import AdamW8bit, step_in_backward


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
