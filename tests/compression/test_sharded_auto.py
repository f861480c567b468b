"""`register_sharded` under `Auto`: what pays is compressed, what does not is summed by PyTorch, and links may change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from meshwright.compression import codec
from meshwright.compression.auto import Auto
from meshwright.compression.auto.inputs import Way
from meshwright.compression.auto.microbenchmark import Rehearsal
from meshwright.compression.sync import Choice, Traffic, register_sharded
from meshwright.errors import InputError
from tests.compression.test_sharded import reduced
from tests.run.pool import pool

# Twice the steps: that a busy machine makes sums slower must not make it pay, a link that is hundreds of times slower must.
WAYS = (Way(Choice()), Way(Choice(codec("int4"), "scatter"), 2.0), Way(Choice(codec("powersgd", rank=4))))
MOST = 30  # steps in which a slower link must have been noticed


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 100))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 512, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(rates: tuple[float, ...], steps: int, copied: bool = False) -> list[tuple[float, str]]:
    """What gradients are off from the mean of all processes' own, and what is told, after every step. The first link lasts
    so many steps, another one until gradients are compressed, and one step more."""
    from benchmarks.network_bed import Pace

    pace, alone = Pace(rates[0]), model()
    ddp, copies = sharded(copied)
    handle = register_sharded(ddp, Auto(WAYS, every=2), copies=copies, traffic=Traffic(pace=pace), limit=30.0)
    found: list[tuple[float, str]] = []
    for rate in rates:
        pace.change(rate)
        for _ in range(steps if rate == rates[0] else MOST):
            found.append((off(ddp, alone, len(found)), handle.explain()))
            if rate != rates[0] and "int4" in found[-2][1]:
                break
    dist.barrier()
    handle.close()
    return found


def sharded(copied: bool) -> tuple[nn.Module, Any]:
    """Over all processes; or two sets of half of them, and the group of equal shards."""
    size = dist.get_world_size()
    mesh = dist.init_device_mesh(
        "cpu", (2, size // 2) if copied else (size,), mesh_dim_names=("copies", "in")[-1 - copied :]
    )
    made, inner = model(), mesh["in"]
    for layer in made:
        fully_shard(layer, mesh=inner)
    return fully_shard(made, mesh=inner), mesh["copies"].get_group() if copied else None


def off(ddp: nn.Module, alone: nn.Module, step: int) -> float:
    """Of one step, at most, relatively."""
    ddp.zero_grad()
    ddp(batch(step, dist.get_rank())).square().mean().backward()
    alone.zero_grad()
    size = dist.get_world_size()
    for rank in range(size):
        (alone(batch(step, rank)).square().mean() / size).backward()
    pairs = zip(ddp.parameters(), alone.parameters(), strict=True)
    return max(float((one.grad.full_tensor() - other.grad).norm() / other.grad.norm()) for one, other in pairs)


def test_where_nothing_pays_sums_are_exact() -> None:
    for found in pool(2).run(trained, (2e10,), 7):
        assert max(one for one, _ in found) < 1e-5
        assert "int4" not in found[-1][1]
        assert "none" in found[-1][1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_over_a_slow_link_gradients_are_compressed_from_the_beginning(ranks: int) -> None:
    every = pool(ranks).run(trained, (1e7,), 5)
    for found in every:
        assert "int4 scatter" in found[-1][1]
        assert "powersgd" not in found[-1][1]  # shards are no whole matrices
        assert all(1e-4 < one < 0.3 for one, _ in found)
        assert found[-1][0] == every[0][-1][0]  # all have the same gradients


def test_a_link_that_becomes_slow_is_seen() -> None:
    for found in pool(2).run(trained, (2e10, 1.5e7), 8):
        assert all(one < 1e-5 for one, told in found[:8] if "int4" not in told)
        assert all("int4" not in told for _, told in found[:8])
        assert "int4 scatter" in found[-1][1]
        assert 1e-4 < found[-1][0] < 0.3


def test_copies_of_shards_are_decided_for_too() -> None:
    slow, fast = pool(4).run(trained, (1e7,), 5, True), pool(4).run(trained, (2e10,), 5, True)
    for found in slow:
        assert "int4 scatter" in found[-1][1]
        assert 1e-4 < found[-1][0] < 0.3
    for found in fast:
        assert "int4" not in found[-1][1]
        assert max(one for one, _ in found) < 1e-5


def test_rehearsals_send_what_is_sent() -> None:
    """To three others: int8 takes a quarter of float32 and its scales; sums stay where they are."""
    (strand,) = Rehearsal(4, owned=True).strands(Choice(codec("int8"), "scatter"), [(1 << 20,)])
    message = codec("int8").bytes([1 << 18])
    assert [leg.sent for leg in strand] == [pytest.approx(3 * message, rel=0.01), 0]
    (plain,) = Rehearsal(4, owned=True).strands(Choice(), [(1 << 20,)])
    assert [leg.sent for leg in plain] == [pytest.approx(3 << 20, rel=0.01), 0]


def test_what_shards_cannot_have_is_refused() -> None:
    for problem in pool(2).run(refused):
        assert problem == [
            "guard: is not there for sharded gradients (valid: none)",
            "ways: no way is possible for shards (valid: Way(Choice(codec('int8'), 'scatter')))",
        ]


def refused() -> list[str]:
    found = []
    for auto in (Auto(WAYS, guard=0.1), Auto(WAYS[2:])):
        with pytest.raises(InputError) as error:
            reduced(auto, 1)
        found.append(str(error.value))
    return found
