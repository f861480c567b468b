"""Gradients on a CUDA device through codecs: two processes share one device, messages travel by gloo.

Compared with means in float64 that one process computes, and with the CPU's own way where that is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.compression import codec, codecs
from meshwright.compression.sync import Choice, Gradients, Options, Synchroniser, register
from meshwright.compression.sync.shards import ShardSynchroniser
from tests.run.pool import pool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SHAPES = ((300, 70), (3,), (40_000,), (1,), (200, 300))
COUNTS = tuple(int(np.prod(shape)) for shape in SHAPES)
ALL = Gradients(tuple("abcde"), SHAPES)
TOPOLOGIES = ("gather", "scatter", "ring", "tree")
ONE_ROUND = [name for name, one in codecs().items() if one.rounds == 1]


def gradient(rank: int, step: int) -> torch.Tensor:
    made = torch.randn(sum(COUNTS), generator=torch.Generator().manual_seed(100 * step + rank))
    return made * torch.linspace(0.1, 3.0, sum(COUNTS))


def gradients(step: int) -> np.ndarray:
    """(rank, number) in float64."""
    return np.stack([gradient(rank, step).double().numpy() for rank in range(2)])


def averaged(choice: Choice, steps: int, dtype: torch.dtype, options: dict[str, Any]) -> tuple[list[Any], Any]:
    """Means of some steps, and what is left unsaid; runs in every process."""
    sync = Synchroniser(choice, Options(limit=20.0, **options))
    means = []
    for step in range(steps):
        flat = gradient(dist.get_rank(), step).to("cuda", dtype)
        assert sync.submit(flat, ALL).wait() is flat
        means.append(flat.double().cpu().numpy())
    kept = [sync.residual(key) for key in ALL.keys]
    assert all(one is None or one.is_cuda for one in kept)
    left = [np.zeros(n) if one is None else one.double().cpu().numpy() for one, n in zip(kept, COUNTS, strict=True)]
    sync.close()
    return means, np.concatenate(left)


def run(choice: Choice, steps: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[list[Any], Any]:
    found = pool(2).run(averaged, choice, steps, dtype, options)
    for mine, others in zip(*(means for means, _ in found), strict=True):
        np.testing.assert_array_equal(mine, others)  # replicas are equal bit by bit
    return found[0][0], np.stack([left for _, left in found])


@pytest.mark.parametrize("piece", [1 << 20, 4096])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_fp16_is_near_the_mean(topology: str, piece: int) -> None:
    means, _ = run(Choice(codec("fp16"), topology, piece=piece), 3)
    for step, mean in enumerate(means):
        np.testing.assert_allclose(mean, gradients(step).mean(0), atol=1e-2)  # numbers up to 14, in steps of 1/128


def test_no_codec_is_the_mean() -> None:
    for step, mean in enumerate(run(Choice(piece=4096), 2)[0]):
        np.testing.assert_allclose(mean, gradients(step).mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ONE_ROUND)
@pytest.mark.parametrize("topology", ["gather", "scatter"])
def test_every_codec_says_everything_in_time(name: str, topology: str) -> None:
    """What was applied plus what is left is the sum of all gradients."""
    means, left = run(Choice(codec(name), topology), 4)
    wanted = sum(gradients(step).sum(0) for step in range(4))
    np.testing.assert_allclose(2 * np.sum(means, axis=0) + left.sum(0), wanted, rtol=1e-3, atol=2e-3)


def test_powersgd_of_full_rank_is_the_mean() -> None:
    means, _ = run(Choice(codec("powersgd", rank=70, factors="")), 2)
    matrix = slice(0, COUNTS[0])
    for step, mean in enumerate(means):
        np.testing.assert_allclose(mean[matrix], gradients(step).mean(0)[matrix], rtol=1e-2, atol=1e-2)


def test_nodes_sum_exactly_inside() -> None:
    means, _ = run(Choice(codec("fp16")), 2, node=2)
    for step, mean in enumerate(means):
        np.testing.assert_allclose(mean, gradients(step).mean(0), atol=1e-2)


def test_buckets_of_bfloat16() -> None:
    for step, mean in enumerate(run(Choice(codec("fp16"), "scatter"), 2, torch.bfloat16)[0]):
        np.testing.assert_allclose(mean, gradients(step).mean(0), rtol=1e-2, atol=3e-2)


def late_and_early() -> list[float]:
    """The producer's stream is slow, the consumer's stream is another one: both orders must hold without a wait of ours."""
    sync = Synchroniser(Choice(codec("fp16"), "scatter", piece=4096), Options(limit=20.0))
    worst = []
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    for step in range(5):
        with torch.cuda.stream(producer):
            flat = torch.zeros(sum(COUNTS), device="cuda")
            torch.cuda._sleep(50_000_000)
            flat.fill_(float(dist.get_rank() + step))
            future = sync.submit(flat, ALL)
        with torch.cuda.stream(consumer):
            found = future.wait().clone()
        consumer.synchronize()
        worst.append(float((found - (step + 0.5)).abs().max()))
    sync.close()
    return worst


def test_streams_are_ordered() -> None:
    for worst in pool(2).run(late_and_early):
        assert max(worst) < 1e-3


def module() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8))


def trained(name: str | None, steps: int) -> list[Any]:
    """Parameters of DDP on the device after some steps, in buckets of some hundred kilobytes."""
    ddp = DistributedDataParallel(module().cuda(), bucket_cap_mb=0.5)
    sync = register(ddp, Choice(codec(name), "scatter", piece=1 << 14), limit=20.0) if name else None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(steps):
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).cuda()
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    if sync:
        sync.close()
    return [one.detach().float().cpu().numpy() for one in ddp.parameters()]


def test_ddp_on_the_device() -> None:
    plain, found = pool(2).run(trained, None, 6), pool(2).run(trained, "fp16", 6)
    for wanted, one, other in zip(plain[0], *found, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, wanted, rtol=1e-3, atol=1e-4)


def scattered(name: str, steps: int) -> tuple[list[Any], Any]:
    """The reduce-scatter of `fully_shard` as it is called on the device, of two gradients."""
    counts, rank = (3000, 70), dist.get_rank()
    sync = ShardSynchroniser(Choice(), Options(mean=False, limit=20.0), None, None, copies=False)
    sync.choices.update(a=Choice(codec(name), piece=1024), b=Choice())
    parts = Gradients(("a/0", "b/0", "a/1", "b/1"), tuple((count,) for count in counts * 2))
    sums = []
    for step in range(steps):
        whole = gradient(rank, step)[: 2 * sum(counts)].cuda()
        into = torch.empty(sum(counts), device="cuda")
        sync.later(sync.scatter(whole, into, parts, 0), into, 1.0)
        del whole  # its memory may be used again: the engine must have said that it still reads it
        torch.full((2 * sum(counts),), torch.nan, device="cuda")
        sync.finish()
        sums.append(into.double().cpu().numpy())
    left = np.concatenate([sync.residual(key).double().cpu().numpy() for key in parts.keys])
    sync.close()
    return sums, left


@pytest.mark.parametrize("name", ["fp16", "int8", "onebit", "topk"])
def test_shards_are_summed_at_their_owners(name: str) -> None:
    found = pool(2).run(scattered, name, 3)
    applied = np.concatenate([np.sum(sums, axis=0) for sums, _ in found])
    wanted = sum(gradients(step)[:, : applied.size].sum(0) for step in range(3))
    left = sum(left for _, left in found)
    np.testing.assert_allclose(applied + left, wanted, rtol=1e-3, atol=2e-3)
    exact = np.concatenate([np.arange(3000, 3070), np.arange(6070, 6140)])
    np.testing.assert_allclose(applied[exact], wanted[exact], rtol=1e-5, atol=1e-5)
