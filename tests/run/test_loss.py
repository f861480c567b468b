"""The loss in chunks against PyTorch's cross entropy in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from meshwright.run.kernels.cross_entropy import linear_loss
from meshwright.run.mesh.collectives import AxisGroup
from tests.run.pool import pool


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(*shape, generator=stream) for shape in ((2, 21, 16), (40, 16)))
    targets = torch.randint(0, 40, (2, 21), generator=stream)
    targets[0, 3:6] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def expected() -> tuple[torch.Tensor, ...]:
    """Loss and both gradients of a third of it."""
    hidden, weight, targets = drawn()
    hidden, weight = (one.detach().double().requires_grad_() for one in (hidden, weight))
    loss = functional.cross_entropy((hidden @ weight.t()).flatten(0, 1), targets.flatten(), reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss / 3, (hidden, weight))


@pytest.mark.parametrize("chunk", [0, 1, 8, 42, 100])
def test_values_and_gradients(chunk: int) -> None:
    hidden, weight, targets = drawn()
    loss = linear_loss(hidden, weight, targets, chunk=chunk)
    found = (loss.detach(), *torch.autograd.grad(loss / 3, (hidden, weight)))
    for one, other in zip(found, expected(), strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


def test_without_gradients_and_a_second_backward_pass() -> None:
    hidden, weight, targets = drawn()
    with torch.no_grad():
        alone = linear_loss(hidden, weight, targets)
    assert float(alone) == pytest.approx(float(expected()[0]), rel=1e-5)
    loss = linear_loss(hidden, weight.detach(), targets)
    loss.backward(retain_graph=True)
    assert weight.grad is None
    with pytest.raises(RuntimeError, match="have been used"):
        loss.backward()


def on_a_rank() -> tuple[torch.Tensor, ...]:
    """With a half of the vocabulary; hidden states' gradients are summed by what enters the head."""
    import torch.distributed as dist

    axis = AxisGroup(2, dist.get_rank(), dist.group.WORLD)
    hidden, weight, targets = drawn()
    mine = weight.detach().chunk(2)[axis.rank].requires_grad_()
    loss = linear_loss(hidden, mine, targets, axis, axis.rank * len(mine), chunk=16)
    dx, dw = torch.autograd.grad(loss / 3, (hidden, mine))
    dist.all_reduce(dx)
    return loss.detach(), dx, dw


def test_a_vocabulary_that_is_cut() -> None:
    parts = pool(2).run(on_a_rank)
    loss, dx, dw = expected()
    for part in parts:
        torch.testing.assert_close(part[0].double(), loss, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(part[1].double(), dx, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]).double(), dw, atol=1e-5, rtol=1e-5)
