"""Gradients of `fully_shard` modules through codecs, in real processes, against sums in float64."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshwright.compression import codec
from meshwright.compression.sync import Choice, PeerLost, Traffic, register_sharded
from meshwright.errors import InputError
from tests.compression.test_sync import answers as answers_of
from tests.compression.test_sync import losing  # noqa: F401
from tests.compression.tiny import Tiny, Whole
from tests.run.pool import Pool, pool

Numbers = dict[str, np.ndarray]


def module() -> nn.Sequential:
    """Seven rows, or one, over three processes: shards that must be filled up, and some that are empty."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 7), nn.Tanh(), nn.Linear(7, 64), nn.Tanh(), nn.Linear(64, 1))


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(16, 24, generator=torch.Generator().manual_seed(10 * step + rank))


def expected(rank: int, step: int) -> Numbers:
    """Gradients of one process alone, of weights that do not change."""
    whole = module()
    whole(inputs(rank, step)).square().sum().backward()
    return {name: one.grad.double().numpy() for name, one in whole.named_parameters()}


def sharded(mesh: DeviceMesh, **policy: Any) -> nn.Module:
    whole = module()
    for layer in whole:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **policy)
    return fully_shard(whole, mesh=mesh, **policy)


def reduced(
    choice: Any, steps: int, backwards: int = 1, policy: Any = None, *, total: bool = False, **options: Any
) -> tuple[list[Numbers], Numbers, int]:
    """Gradients of every step as a whole, what is left unsaid of every parameter, and bytes sent."""
    traffic = Traffic()
    model = sharded(dist.init_device_mesh("cpu", (dist.get_world_size(),)), **(policy or {}))
    if total:  # PyTorch then divides by the number of processes itself, after the sum
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.set_force_sum_reduction_for_comms(True)
    handle = register_sharded(model, choice, limit=20.0, traffic=traffic, **options)
    found = []
    for step in range(steps):
        model.zero_grad()
        for _ in range(backwards):
            model(inputs(dist.get_rank(), step)).square().sum().backward()
        found.append(grads_of(model))
    left = {
        name: np.concatenate([one.double().numpy() for one in handle.residuals(name)] or [np.zeros(0)])
        for name, _ in model.named_parameters()
    }
    handle.close()
    return found, left, traffic.sent


def grads_of(model: nn.Module) -> Numbers:
    return {name: one.grad.full_tensor().double().numpy() for name, one in model.named_parameters()}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_an_exact_codec_gives_the_mean(ranks: int) -> None:
    """Several modules under way at once, in pieces that cut through gradients."""
    for found, left, _ in pool(ranks).run(reduced, Choice(Tiny("exact"), piece=128), 2):
        for step, grads in enumerate(found):
            every = [expected(rank, step) for rank in range(ranks)]
            for name, grad in grads.items():
                np.testing.assert_allclose(grad, np.mean([one[name] for one in every], 0), rtol=1e-4, atol=1e-4)
        assert not any(one.any() for one in left.values())


@pytest.mark.parametrize("coder", [Tiny("signs"), codec("onebit"), codec("int4"), codec("topk"), codec("terngrad")])
def test_what_is_not_said_is_said_later(coder: Any) -> None:
    """What was applied plus what residuals hold is the sum of all gradients."""
    ranks, steps = 3, 3
    found = pool(ranks).run(reduced, Choice(coder, piece=256), steps)
    some = 0.0
    for name, wanted in expected(0, 0).items():
        total = sum(expected(rank, step)[name] for rank in range(ranks) for step in range(steps))
        applied = ranks * sum(grads[name] for grads in found[0][0])
        left = sum(one[1][name] for one in found)[: wanted.size].reshape(wanted.shape)
        np.testing.assert_allclose(applied + left, total, rtol=1e-3, atol=2e-3 * np.abs(total).max())
        some = max(some, np.abs(left).max())
    assert some > 0.1  # it is lossy indeed


def test_bytes_are_those_of_the_messages() -> None:
    """Each sends its shares to two others; int8 takes a quarter, and a step for each block."""
    plain, eighth = (pool(3).run(reduced, Choice(one), 1) for one in (Tiny("exact"), codec("int8", block=64)))
    assert plain[0][2] > 2 * 4 * sum(one.size for one in expected(0, 0).values()) / 3
    assert all(
        small[2] < 0.55 * large[2] for small, large in zip(eighth, plain, strict=True)
    )  # tiny ones: mostly heads


@pytest.mark.parametrize(
    ("policy", "backwards", "total"),
    [
        ({}, 2, False),
        ({"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}, 1, False),
        ({"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}, 1, False),
        ({}, 1, True),
    ],
    ids=["added up", "reduced in bf16", "computed in bf16", "divided after the sum"],
)
def test_results_that_pytorch_reads_are_complete(policy: Any, backwards: int, total: bool) -> None:
    precise = not policy
    for found, _, _ in pool(2).run(run_reduced, Choice(Tiny("exact")), policy, backwards, total):
        every = [expected(rank, 0) for rank in range(2)]
        for name, grad in found[0].items():
            wanted = backwards * np.mean([one[name] for one in every], 0)
            np.testing.assert_allclose(
                grad, wanted, rtol=1e-4 if precise else 0.1, atol=(1e-4 if precise else 0.05) * np.abs(wanted).max()
            )


def run_reduced(choice: Any, policy: Any, backwards: int, total: bool) -> Any:
    return reduced(choice, 1, backwards, policy, total=total)


def mixed(name: str, weight: torch.Tensor) -> Choice:
    return Choice(Tiny("signs")) if weight.dim() > 1 else Choice()


def test_each_gradient_may_have_its_own_choice() -> None:
    answers = pool(2).run(reduced, mixed, 2)
    every = [expected(rank, 1) for rank in range(2)]
    for found, _, _ in answers:
        for name, grad in found[1].items():
            wanted = np.mean([one[name] for one in every], 0)
            exact = np.allclose(grad, wanted, rtol=1e-4, atol=1e-4)
            assert exact == name.endswith("bias"), name
            assert any(left[name].any() for _, left, _ in answers) != name.endswith("bias")


def hybrid(choice: Any, steps: int) -> tuple[list[Numbers], Numbers, list[np.ndarray]]:
    """Two sets of two shards; ranks of a node are adjacent."""
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    model = sharded(DeviceMesh.from_group(groups[rank // 2], "cpu"))
    handle = register_sharded(model, choice, copies=groups[2 + rank % 2], limit=20.0)
    found = []
    for step in range(steps):
        model.zero_grad()
        model(inputs(rank, step)).square().sum().backward()
        found.append(grads_of(model))
    left = {name: handle.residuals(name)[0].double().numpy() for name, _ in model.named_parameters()}
    handle.close()
    return found, left, []


def test_hybrid_sharding_compresses_between_copies() -> None:
    steps = 3
    exact = pool(4).run(hybrid, Choice(Tiny("exact"), "scatter"), 1)
    every = [expected(rank, 0) for rank in range(4)]
    for found, _, _ in exact:
        for name, grad in found[0].items():
            np.testing.assert_allclose(grad, np.mean([one[name] for one in every], 0), rtol=1e-4, atol=1e-4)
    lossy = pool(4).run(hybrid, Choice(Tiny("signs"), "scatter"), steps)
    for name, wanted in expected(0, 0).items():
        total = sum(expected(rank, step)[name] for rank in range(4) for step in range(steps))
        applied = 4 * sum(grads[name] for grads in lossy[0][0])
        # Shards of one set were averaged over two before they were encoded.
        left = np.concatenate([2 * (lossy[shard][1][name] + lossy[shard + 2][1][name]) for shard in range(2)])
        left = left[: wanted.size].reshape(wanted.shape)
        np.testing.assert_allclose(applied + left, total, rtol=1e-3, atol=2e-3 * np.abs(total).max())
    np.testing.assert_array_equal(lossy[0][0][-1]["2.weight"], lossy[3][0][-1]["2.weight"])


class Sometimes(nn.Module):
    """Whose weight is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        return (x @ self.weight.T if used else 0) + self.bias * x.sum()


def some_unused() -> list[tuple[float, bool]]:
    model = fully_shard(Sometimes(), mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    handle = register_sharded(model, Choice(Tiny("exact")), limit=20.0)
    found = []
    for used in (True, False, True):
        model.zero_grad()
        model(torch.full((1, 8), float(dist.get_rank() + 1)), used).sum().backward()
        found.append((float(model.bias.grad.full_tensor().sum()), model.weight.grad is not None))
    handle.close()
    return found


def test_gradients_that_are_missing_are_no_obstacle() -> None:
    assert pool(2).run(some_unused) == [[(48.0, True), (48.0, False), (48.0, True)]] * 2


def lose(how: str) -> tuple[str, tuple[int, ...]]:
    """Two good steps; in the third, rank 2 is lost in its backward pass."""
    dist.barrier()
    model = sharded(dist.init_device_mesh("cpu", (3,)), reshard_after_forward=False)
    handle = register_sharded(model, Choice(Tiny("signs")), limit=3.0)
    try:
        for step in range(3):
            loss = model(inputs(dist.get_rank(), step)).square().sum()
            if dist.get_rank() == 2 and step == 2:
                loss.register_hook(lambda _: os._exit(1) if how == "dies" else time.sleep(9.0))
            loss.backward()
    except PeerLost as error:
        return str(error), error.peers
    finally:
        del handle
    return "no error", ()


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_lost_peer_is_named_in_the_backward_pass(losing: Pool, how: str) -> None:  # noqa: F811
    for said, peers in answers_of(losing, lose, how)[:2]:
        assert peers == (2,)
        assert "rank 2 (" in said
        assert "of step 2" in said


@pytest.mark.parametrize(
    ("choice", "options", "told"),
    [
        (Choice(codec("powersgd")), {}, "powersgd needs whole matrices"),
        (Choice(Whole("whole")), {}, "summed by all"),
        (Choice(Tiny("exact")), {"momentum": 0.5}, "momentum"),
        (Choice(Tiny("exact")), {"node": 2}, "node"),
    ],
)
def test_what_cannot_be_scattered_is_refused(choice: Choice, options: dict[str, Any], told: str) -> None:
    assert all(told in said for said in pool(2).run(refused, choice, options))


def refused(choice: Choice, options: dict[str, Any]) -> str:
    model = sharded(dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    try:
        register_sharded(model, choice, **options)
    except InputError as error:
        return str(error)
    return "no error"
