"""`register` under `Auto`: DDP is left alone where nothing pays, and gets a hook when something begins to."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.compression import codec
from meshwright.compression.auto import Auto
from meshwright.compression.auto.inputs import Way
from meshwright.compression.sync import Choice, Traffic, register
from tests.run.pool import pool

# Twice the steps: that a busy machine makes sums slower must not make it pay, a link that is hundreds of times slower must.
MOST = 30  # steps in which a slower link must have been noticed
WAYS = (Way(Choice()), Way(Choice(codec("int4"), "scatter"), 2.0))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 512, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(rates: tuple[float, ...], steps: int, **options: Any) -> list[tuple[int, float, str]]:
    """Hooks, what the gradients are off from the mean of both processes' own, and what is told, after every step; a step
    over a slow link takes longer, as DDP's sums would. The first link lasts so many steps, another one until DDP has a
    hook, and one step more: how many that takes depends on what else the machine does."""
    from benchmarks.network_bed import Pace

    pace, alone = Pace(rates[0]), model()
    ddp = DistributedDataParallel(model(), bucket_cap_mb=1, **options)
    state = register(ddp, Auto(WAYS, every=2), traffic=Traffic(pace=pace), limit=30.0)
    found: list[tuple[int, float, str]] = []
    for rate in rates:
        pace.change(rate)
        for _ in range(steps if rate == rates[0] else MOST):
            time.sleep(0.1 if rate == rates[0] else 8 * 2.1e6 / rate)  # 2.1 MB of gradients
            found.append(stepped(ddp, alone, len(found), state))
            if rate != rates[0] and found[-2][0]:
                break
    dist.barrier()
    state.close()
    return found


def stepped(ddp: Any, alone: nn.Module, step: int, state: Any) -> tuple[int, float, str]:
    ddp.zero_grad()
    ddp(batch(step, dist.get_rank())).square().mean().backward()
    alone.zero_grad()
    for rank in range(2):
        (alone(batch(step, rank)).square().mean() / 2).backward()
    pairs = zip(ddp.parameters(), alone.parameters(), strict=True)
    off = max(float((one.grad - other.grad).norm() / other.grad.norm()) for one, other in pairs)
    return len(ddp._comm_hooks), off, state.explain()


def test_ddp_is_left_alone_where_nothing_pays() -> None:
    for found in pool(2).run(trained, (2e10,), 8):
        assert [hooks for hooks, _, _ in found] == [0] * 8
        assert max(off for _, off, _ in found) < 1e-5
        assert "none" in found[-1][2]
        assert "int4" not in found[-1][2]


def test_a_link_that_becomes_slow_is_seen_and_ddp_gets_its_hook() -> None:
    for found in pool(2).run(trained, (2e10, 1.5e7), 8):
        hooks = [one for one, _, _ in found]
        assert hooks[:8] == [0] * 8
        assert hooks[-1] == 1
        assert "int4 scatter" in found[-1][2]
        assert max(off for hooks, off, _ in found if not hooks) < 1e-5
        assert 1e-5 < found[-1][1] < 0.25  # codes of 4 bits are at work


def test_a_slow_link_has_a_hook_from_the_beginning() -> None:
    for found in pool(2).run(trained, (1e7,), 2):
        assert [hooks for hooks, _, _ in found] == [1, 1]


def test_what_ddp_alone_would_not_do_has_a_hook() -> None:
    """Processes that may use different parameters, and what the synchroniser was asked for besides."""
    assert pool(2).run(hooked) == [[1, 1, 1, 1]] * 2


def hooked() -> list[int]:
    asked: list[tuple[bool, dict[str, Any]]] = [
        (True, {}), (False, {"momentum": 0.5}), (False, {"mean": False}),
        (False, {"warm_up": ((3, Choice(codec("int8"))),)}),
    ]  # fmt: skip
    found = []
    for unused, options in asked:
        ddp = DistributedDataParallel(model(), find_unused_parameters=unused)
        state = register(ddp, Auto(WAYS), limit=30.0, **options)
        dist.barrier()
        state.close()
        found.append(len(ddp._comm_hooks))
    return found


def accumulated() -> tuple[int, float]:
    """Two micro-batches a step, the first without sums."""
    ddp, alone = DistributedDataParallel(model()), model()
    state = register(ddp, Auto(WAYS[:1]), limit=30.0)
    for step in range(4):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(batch(2 * step, dist.get_rank())).square().mean().backward()
        ddp(batch(2 * step + 1, dist.get_rank())).square().mean().backward()
    alone.zero_grad()
    for rank in range(2):
        for micro in (6, 7):
            (alone(batch(micro, rank)).square().mean() / 2).backward()
    pairs = zip(ddp.parameters(), alone.parameters(), strict=True)
    off = max(float((one.grad - other.grad).norm() / other.grad.norm()) for one, other in pairs)
    dist.barrier()
    state.close()
    return state.step, off


def test_only_steps_that_sum_are_counted() -> None:
    for steps, off in pool(2).run(accumulated):
        assert steps == 4
        assert off < 1e-5
