"""Synchronisation in real processes, against formulas in float64 and against plain DDP."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.compression import codec, codecs
from meshwright.compression.auto import Auto, Way
from meshwright.compression.sync import Choice, Gradients, Options, PeerLost, Synchroniser, Traffic, register
from meshwright.compression.sync.layout import Piece, cut
from meshwright.errors import InputError
from tests.compression.tiny import SAID, Tiny, Whole
from tests.run.pool import Pool, pool

SHAPES = ((7, 5), (3,), (400,), (1,), (20, 30))
COUNTS = tuple(int(np.prod(shape)) for shape in SHAPES)
ALL = Gradients(tuple("abcde"), SHAPES)
TOPOLOGIES = ("gather", "scatter", "ring", "tree")


def gradient(rank: int, step: int) -> torch.Tensor:
    made = torch.randn(sum(COUNTS), generator=torch.Generator().manual_seed(100 * step + rank))
    return made * torch.linspace(0.1, 3.0, sum(COUNTS))


def gradients(ranks: int, step: int) -> np.ndarray:
    """(rank, number) in float64."""
    return np.stack([gradient(rank, step).double().numpy() for rank in range(ranks)])


def averaged(choice: Any, steps: int, options: dict[str, Any]) -> tuple[list[np.ndarray], np.ndarray, int]:
    """Means of some steps, what is left unsaid, and bytes sent; runs in every process."""
    traffic = Traffic()
    sync = Synchroniser(choice, Options(limit=20.0, **options), traffic=traffic)
    means = []
    for step in range(steps):
        flat = gradient(dist.get_rank(), step)
        assert sync.submit(flat, ALL).wait() is flat
        means.append(flat.double().numpy())
    kept = [sync.residual(key) for key in ALL.keys]
    left = np.concatenate(
        [np.zeros(n) if one is None else one.double().numpy() for one, n in zip(kept, COUNTS, strict=True)]
    )
    sync.close()
    return means, left, traffic.sent


def run(ranks: int, choice: Any, steps: int = 1, **options: Any) -> tuple[list[np.ndarray], np.ndarray, list[int]]:
    """What all processes agree on, bit by bit; residuals by rank; bytes by rank."""
    found = pool(ranks).run(averaged, choice, steps, options)
    for means, _, _ in found[1:]:
        for mine, others in zip(found[0][0], means, strict=True):
            np.testing.assert_array_equal(mine, others)
    return found[0][0], np.stack([left for _, left, _ in found]), [sent for _, _, sent in found]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_an_exact_codec_gives_the_mean(ranks: int, topology: str) -> None:
    """Cut into many pieces, of which some are smaller than there are processes."""
    means, left, _ = run(ranks, Choice(Tiny("exact"), topology, piece=100), steps=2)
    for step, mean in enumerate(means):
        np.testing.assert_allclose(mean, gradients(ranks, step).mean(0), rtol=1e-5, atol=1e-6)
    assert not left.any()


@pytest.mark.parametrize("node", [1, 2])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_what_is_not_said_is_said_later(topology: str, node: int) -> None:
    """What was applied plus what residuals hold is the sum of all gradients."""
    steps = 4
    means, left, _ = run(4, Choice(Tiny("signs"), topology, piece=256), steps, node=node)
    applied = 4 * np.sum(means, axis=0)
    wanted = sum(gradients(4, step).sum(0) for step in range(steps))
    np.testing.assert_allclose(applied + left.sum(0), wanted, rtol=1e-4, atol=1e-3)
    assert np.abs(left).max() > 0.1  # it is lossy indeed


def said(name: str, numbers: np.ndarray, counts: tuple[int, ...]) -> np.ndarray:
    parts = torch.from_numpy(numbers).split(counts)
    return np.concatenate([SAID[name](part).numpy() for part in parts])


@pytest.mark.parametrize("name", ["halves", "signs", "top"])
def test_gather_is_the_mean_of_what_is_said(name: str) -> None:
    means, _, _ = run(2, Choice(Tiny(name), "gather"), steps=3)
    left = np.zeros((2, sum(COUNTS)))
    for step, mean in enumerate(means):
        seen = gradients(2, step) + left
        told = np.stack([said(name, one, COUNTS) for one in seen])
        left = seen - told
        np.testing.assert_allclose(mean, told.mean(0), rtol=1e-4, atol=1e-4)


def test_without_error_feedback_nothing_is_kept() -> None:
    means, left, _ = run(2, Choice(Tiny("signs"), "gather"), steps=2, error_feedback=False)
    for step, mean in enumerate(means):
        told = np.stack([said("signs", one, COUNTS) for one in gradients(2, step)])
        np.testing.assert_allclose(mean, told.mean(0), rtol=1e-4)
    assert not left.any()


def test_scatter_encodes_sums_at_their_owner() -> None:
    means, _, _ = run(3, Choice(Tiny("signs"), "scatter"), steps=3)
    pieces = cut(Piece(0, COUNTS), 3)
    left = np.zeros((3, sum(COUNTS)))
    for step, mean in enumerate(means):
        seen = gradients(3, step)
        for owner, piece in enumerate(pieces):
            own = slice(piece.start, piece.stop)
            total = seen[owner, own].copy()
            for rank in {0, 1, 2} - {owner}:
                told = said("signs", seen[rank, own] + left[rank, own], piece.counts)
                left[rank, own] += seen[rank, own] - told
                total += told
            told = said("signs", total + left[owner, own], piece.counts)
            left[owner, own] += total - told
            np.testing.assert_allclose(mean[own], told / 3, rtol=1e-4, atol=1e-4)


def test_momentum_correction_gathers_locally() -> None:
    """DGC: u = m u + g, v = v + u; the largest of v are sent, and where they were both begin anew."""
    means, _, _ = run(2, Choice(Tiny("top"), "gather"), steps=4, momentum=0.9)
    u = v = np.zeros((2, sum(COUNTS)))
    for step, mean in enumerate(means):
        u = 0.9 * u + gradients(2, step)
        v = v + u
        told = np.stack([said("top", one, COUNTS) for one in v])
        u, v = np.where(told != 0, 0, u), v - told
        np.testing.assert_allclose(mean, told.mean(0), rtol=1e-4, atol=1e-4)


def test_warm_up_is_plain_then_weak_then_strong() -> None:
    warm_up = ((1, Choice()), (2, Choice(Tiny("halves"))))
    means, left, _ = run(2, Choice(Tiny("signs")), steps=4, warm_up=warm_up)
    np.testing.assert_allclose(means[0], gradients(2, 0).mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(means[1], gradients(2, 1).mean(0), rtol=1e-2, atol=1e-3)
    assert np.abs(means[2] - gradients(2, 2).mean(0)).max() > 0.1
    total = sum(gradients(2, step).sum(0) for step in range(4))
    np.testing.assert_allclose(2 * np.sum(means, axis=0) + left.sum(0), total, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("ranks", "node"), [(2, 1), (3, 1), (4, 1), (4, 2)])
def test_codes_that_sum_are_never_decoded_on_the_way(ranks: int, node: int) -> None:
    means, left, _ = run(ranks, Choice(Whole("whole")), steps=2, node=node)
    for step, mean in enumerate(means):
        np.testing.assert_allclose(mean, gradients(ranks, step).mean(0), atol=0.05)
    total = sum(gradients(ranks, step).sum(0) for step in range(2))
    np.testing.assert_allclose(ranks * np.sum(means, axis=0) + left.sum(0), total, rtol=1e-4, atol=1e-3)


def chosen(counts: tuple[int, ...]) -> list[Choice]:
    return [Choice(Tiny("signs"), "scatter") if count > 100 else Choice() for count in counts]


def test_each_gradient_may_have_its_own_choice() -> None:
    means, left, _ = run(3, chosen, steps=2)
    small = np.concatenate([np.full(count, count <= 100) for count in COUNTS])
    np.testing.assert_allclose(means[1][small], gradients(3, 1).mean(0)[small], rtol=1e-5, atol=1e-6)
    assert not left[:, small].any()
    assert left[:, ~small].any()


def test_bytes_are_those_of_the_topology() -> None:
    """One piece: gather sends 3 messages; scatter a part to each owner and 3 of the own; a tree up and down."""

    def size(counts: tuple[int, ...]) -> int:
        return 32 + -(-4 * (len(counts) + sum(counts)) // 8) * 8

    sent = {name: run(4, Choice(Tiny("exact"), name))[2] for name in TOPOLOGIES}
    parts = [size(piece.counts) for piece in cut(Piece(0, COUNTS), 4)]
    assert sent["gather"] == [3 * size(COUNTS)] * 4
    assert sent["scatter"] == [sum(parts) + 2 * part for part in parts]
    assert sum(sent["ring"]) == 6 * sum(parts)
    assert sent["tree"] == [count * size(COUNTS) for count in (2, 2, 1, 1)]  # 0 is above 1 and 2, 1 above 3


def mixed(counts: tuple[int, ...]) -> list[Choice]:
    ways = [Choice(Tiny("exact"), name, piece=64) for name in ("ring", "tree", "scatter", "gather")]
    return [[*ways, Choice(piece=64)][i % 5] for i in range(len(counts))]


def hurried(seed: int) -> float:
    """Far more pieces than may be under way, over all topologies at once, in processes that are late by chance."""
    rank, late = dist.get_rank(), random.Random(10 * seed + dist.get_rank())
    sync = Synchroniser(mixed, Options(limit=20.0))
    worst = 0.0
    for step in range(5):
        under_way = []
        for bucket in range(4):
            shapes = tuple((random.Random(7 * bucket + i).randint(1, 300),) for i in range(6))
            flat = torch.full((sum(shape[0] for shape in shapes),), float(rank + bucket + step))
            keys = tuple((bucket, i) for i in range(6))
            under_way.append(sync.submit(flat, Gradients(keys, shapes), bucket, last=bucket == 3))
            time.sleep(0.01 * late.random())
        for bucket, future in enumerate(under_way):
            worst = max(worst, float((future.wait() - (bucket + step + 1.5)).abs().max()))
    sync.close()
    return worst


@pytest.mark.parametrize("seed", range(3))
def test_topologies_mix_without_deadlock(seed: int) -> None:
    assert max(pool(4).run(hurried, seed)) < 1e-5


def bad_one(topology: str) -> list[bool]:
    sync = Synchroniser(Choice(Tiny("signs"), topology), Options(limit=20.0))
    flat = gradient(dist.get_rank(), 0)
    if dist.get_rank() == 1:
        flat[40] = torch.inf
    sync.submit(flat, ALL).wait()
    sync.close()
    return [bool(one.isfinite().all()) for one in flat.split(COUNTS)]


@pytest.mark.parametrize("topology", ["gather", "tree"])
def test_infinite_numbers_are_told_to_all_and_not_spread(topology: str) -> None:
    assert pool(3).run(bad_one, topology) == [[True, True, False, True, True]] * 3


def in_given_nodes() -> np.ndarray:
    """Nodes that are not made of adjacent ranks: even and odd ones."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    sync = Synchroniser(Choice(Tiny("exact"), "ring"), Options(limit=20.0, node=groups[dist.get_rank() % 2]))
    flat = gradient(dist.get_rank(), 0)
    sync.submit(flat, ALL).wait()
    sync.close()
    return flat.double().numpy()


def test_nodes_may_be_given_as_groups() -> None:
    for found in pool(4).run(in_given_nodes):
        np.testing.assert_allclose(found, gradients(4, 0).mean(0), rtol=1e-5, atol=1e-6)


def uneven_nodes() -> str:
    try:
        Synchroniser(Choice(), Options(node=2))
    except InputError as error:
        return str(error)
    return "no error"


def test_nodes_of_different_sizes_are_refused() -> None:
    assert all(said.startswith("node: makes nodes of ranks [(0, 1), (2,)]") for said in pool(3).run(uneven_nodes))


# --- DistributedDataParallel


def module(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(dtype)


def trained(choice: Choice | None, dtype: torch.dtype, steps: int, options: dict[str, Any]) -> tuple[list[Any], int]:
    """Parameters after some steps, with buckets of a few kilobytes, and how many parameters have residuals."""
    ddp = DistributedDataParallel(module(dtype), bucket_cap_mb=0.008)
    sync = register(ddp, choice, limit=20.0, **options) if choice else None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(steps):
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(dtype)
        optimizer.zero_grad()
        ddp(x).float().square().mean().backward()
        optimizer.step()
    kept = 0
    if sync:
        kept = sum(bool((one != 0).any()) for one in sync._residuals.kept.values())
        sync.close()
    return [one.detach().float().numpy() for one in ddp.parameters()], kept


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_ddp_with_an_exact_codec_is_plain_ddp(topology: str) -> None:
    plain = pool(3).run(trained, None, torch.float32, 4, {})
    ours = pool(3).run(trained, Choice(Tiny("exact"), topology, piece=512), torch.float32, 4, {})
    for (wanted, _), (found, _) in zip(plain, ours, strict=True):
        for one, other in zip(wanted, found, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_ddp_in_bfloat16_on_gloo() -> None:
    """Sums are float32 on the way: all processes hold the same, near what float32 trains."""
    wanted = pool(2).run(trained, None, torch.float32, 3, {})[0][0]
    found = [
        parameters for parameters, _ in pool(2).run(trained, Choice(Tiny("exact"), "scatter"), torch.bfloat16, 3, {})
    ]
    for one, other, near in zip(*found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(one, near, atol=0.02)


def test_powersgd_with_several_buckets() -> None:
    """A rank as large as the matrices is exact; a small one leaves something, and replicas are equal. DDP's hook hangs."""
    plain = pool(2).run(trained, None, torch.float32, 4, {})
    full, low = (
        pool(2).run(trained, Choice(codec("powersgd", rank=rank, factors=factors)), torch.float32, 4, {})
        for rank, factors in ((64, ""), (2, "int8"))
    )
    for one, other in zip(plain[0][0], full[0][0], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)
    for i, one in enumerate(low[0][0]):
        np.testing.assert_array_equal(one, low[1][0][i])
    assert low[0][1] >= 2  # matrices are not said in full


SHIPPED = [name for name, one in codecs().items() if one.rounds == 1]


@pytest.mark.parametrize("topology", ["gather", "scatter"])
def test_shipped_codecs_say_everything_in_time(topology: str) -> None:
    """Of every codec, four steps: what was applied plus what is left is the sum of all gradients."""
    for name in (*SHIPPED, "powersgd"):
        means, left, _ = run(4, Choice(codec(name), topology), steps=4)
        wanted = sum(gradients(4, step).sum(0) for step in range(4))
        np.testing.assert_allclose(
            4 * np.sum(means, axis=0) + left.sum(0), wanted, rtol=1e-3, atol=2e-3, err_msg=f"{name} over {topology}"
        )


def rebuilt() -> tuple[Any, Any, Any]:
    """Sums over steps of what was applied and of what this process had, over DDP's new buckets after step 1."""
    ddp = DistributedDataParallel(module(), bucket_cap_mb=0.008)
    sync = register(ddp, Choice(Tiny("signs"), "scatter"), limit=20.0)
    had, applied = ([torch.zeros_like(one) for one in ddp.parameters()] for _ in range(2))
    for step in range(3):
        x = torch.randn(16, 24, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loose = torch.autograd.grad(ddp.module(x).square().mean(), list(ddp.module.parameters()))
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        for total, one in zip(had, loose, strict=True):
            total += one
        for total, parameter in zip(applied, ddp.parameters(), strict=True):
            total += parameter.grad
    left = [sync.residual(id(one)) for one in ddp.parameters()]
    sync.close()
    return tuple(np.concatenate([one.numpy().ravel() for one in many]) for many in (had, applied, left))  # type: ignore[return-value]


def test_residuals_survive_new_buckets() -> None:
    found = pool(2).run(rebuilt)
    had, left = (sum(one[i] for one in found) for i in (0, 2))
    np.testing.assert_allclose(2 * found[0][1] + left, had, rtol=1e-3, atol=1e-5)


# --- peers that are lost


@pytest.fixture
def losing() -> Iterator[Pool]:
    """Processes of our own, some of which will be lost."""
    made = Pool(3)
    yield made
    made.close()


def answers(pool: Pool, *work: Any) -> list[Any]:
    for end in pool._ends:
        end.send((work[0], work[1:]))
    found = []
    for end in pool._ends:
        try:
            assert end.poll(30.0)
            found.append(end.recv()[1])
        except EOFError:
            found.append("dead")
    return found


def lose(how: str, topology: str, limit: float) -> tuple[str, tuple[int, ...], int, float]:
    """Two good steps, then rank 2 is lost in the third."""
    dist.barrier()
    choice: Any = Choice() if topology == "plain" else Auto((Way(Choice()),)) if topology == "none pays" else None
    sync = Synchroniser(choice or Choice(Tiny("signs"), topology), Options(limit=limit))
    lost = dist.get_rank() == 2
    begin = time.monotonic()
    try:
        for step in range(3):
            if lost and step == 2:
                if how == "dies":
                    os._exit(1)
                if how == "hangs":
                    time.sleep(3 * limit)
                if how == "is cut":
                    _cut_messages()
                if how == "fails":
                    sync._choice, sync._buckets, SAID["exact"] = Choice(Tiny("exact")), {}, _broken
            begin = time.monotonic()
            sync.submit(gradient(dist.get_rank(), step), ALL, bucket=5).wait()
    except RuntimeError as error:
        if not isinstance(sync.error, PeerLost):
            return str(error), (), -1, 0.0
        return str(error), sync.error.peers, sync.error.bucket, time.monotonic() - begin
    return "no error", (), -1, 0.0


def _broken(numbers: torch.Tensor) -> torch.Tensor:
    raise ValueError("no way to say this")


def _cut_messages() -> None:
    whole = dist.isend
    dist.isend = lambda tensor, **where: whole(tensor[:-64], **where)


@pytest.mark.parametrize(
    ("how", "topology", "limit"),
    [
        ("dies", "gather", 20.0),
        ("dies", "plain", 20.0),
        ("dies", "ring", 20.0),
        ("dies", "none pays", 20.0),
        ("hangs", "ring", 1.5),
        ("hangs", "none pays", 1.5),
        ("is cut", "scatter", 3.0),
        ("is cut", "plain", 3.0),
        ("fails", "gather", 3.0),
    ],
)
def test_a_lost_peer_is_named_by_all_others(losing: Pool, how: str, topology: str, limit: float) -> None:
    for said, peers, bucket, seconds in answers(losing, lose, how, topology, limit)[:2]:
        assert "rank 2 (" in said
        assert "bucket 5 of step 2" in said
        assert (peers, bucket) == ((2,), 5)
        assert seconds < 8.0


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"momentum": 1.0}, "momentum: is 1.0"),
        ({"limit": 0.0}, "limit"),
        ({"warm_up": ((5, Choice()), (2, Choice()))}, "rising"),
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Options(**wrong)
