"""What users do with `register`, on purpose and by mistake: real processes, against gradients of one process."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from meshwright.compression import Codec, codec
from meshwright.compression.auto import Auto, Way
from meshwright.compression.language import half
from meshwright.compression.sync import Choice, PeerLost, Synchroniser, Traffic, register, register_sharded
from meshwright.errors import InputError
from tests.compression.test_sync import answers, losing  # noqa: F401
from tests.run.pool import Pool, pool

PLAIN = Auto((Way(Choice()),), every=2)


def model(wide: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, wide), nn.ReLU(), nn.Linear(wide, 8))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * step + rank))


def stepped(ddp: nn.Module, step: int) -> None:
    ddp.zero_grad()
    ddp(batch(step, dist.get_rank())).square().sum().backward()


def wrong_of(work: Any) -> str:
    try:
        work()
    except InputError as error:
        return str(error)
    return "nothing"


# --- a guard


def off_under_guard(guard: float, steps: int) -> tuple[float, set[str]]:
    """The most that the gradient of a parameter was off from the mean, relatively, over a slow link; ways that were gone."""
    alone, ddp = model(1024), DistributedDataParallel(model(1024))
    state = register(ddp, Auto(guard=guard, every=4), traffic=Traffic(pace=lambda size: time.sleep(size / 4e6)))
    worst, ways = 0.0, set()
    for step in range(steps):
        stepped(ddp, step)
        alone.zero_grad()
        for rank in range(2):
            (alone(batch(step, rank)).square().sum() / 2).backward()
        for one, other in zip(ddp.parameters(), alone.parameters(), strict=True):
            worst = max(worst, float((one.grad - other.grad).norm() / other.grad.norm()))
        ways |= {way.name.split()[0] for way in state.pilot._ways.values()}
    dist.barrier()
    state.close()
    return worst, ways


@pytest.mark.parametrize(("guard", "compressed"), [(0.002, False), (0.1, True), (0.4, True)])
def test_no_gradient_is_off_by_more_than_the_guard(guard: float, compressed: bool) -> None:
    for worst, ways in pool(2).run(off_under_guard, guard, 24):
        assert worst <= guard
        assert bool(ways - {"none", "fp16"}) == compressed


# --- numbers that are infinite, strides


def after_infinity(name: str | None, momentum: float) -> list[int]:
    """Numbers of all gradients that are bad, step by step; one process has an infinite one in the third."""
    ddp = DistributedDataParallel(model())
    state = register(ddp, Choice(codec(name) if name else None), momentum=momentum, limit=20.0)
    found = []
    for step in range(6):
        ddp.zero_grad()
        x = batch(step, dist.get_rank())
        if step == 2 and dist.get_rank() == 1:
            x[0, 0] = torch.inf
        ddp(x).square().sum().backward()
        found.append(sum(int((~one.grad.isfinite()).sum()) for one in ddp.parameters()))
    dist.barrier()
    state.close()
    return found


@pytest.mark.parametrize("name", [None, "int8", "topk", "powersgd"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_infinite_gradient_is_told_once(name: str | None, momentum: float) -> None:
    for bad in pool(2).run(after_infinity, name, momentum):
        assert bad[2] > 0
        assert [bool(one) for one in bad] == [False, False, True, False, False, False]


def lost_of_strides(strided: bool) -> float:
    """What rank 2 leaves of a gradient of rank 1."""
    layer = nn.Linear(96, 64, bias=False)
    if strided:
        layer.weight = nn.Parameter(torch.zeros(96, 64).t())
    ddp = DistributedDataParallel(layer)
    state = register(ddp, Choice(codec("powersgd", rank=2)), error_feedback=False, limit=20.0)
    for _ in range(3):
        ddp.zero_grad()
        (ddp(torch.arange(96.0).repeat(4, 1)) * torch.arange(64.0)).sum().backward()
    wanted = 4 * torch.outer(torch.arange(64.0), torch.arange(96.0))
    dist.barrier()
    state.close()
    return float((layer.weight.grad - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("strided", [False, True])
def test_matrices_are_those_of_memory(strided: bool) -> None:
    assert max(pool(2).run(lost_of_strides, strided)) < 0.02


# --- names, checkpoints, one's own codec


def restored() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:
    """What was applied in all, over two lives of a run, what is left unsaid, and what was kept between them."""
    applied = {name: torch.zeros_like(one) for name, one in model().named_parameters()}
    kept: dict[str, torch.Tensor] = {}
    for life in range(2):
        ddp = DistributedDataParallel(model())
        state = register(ddp, Choice(codec("topk", part=0.05), "scatter"), limit=20.0)
        if kept:
            state.restore(kept)
        for step in range(4 * life, 4 + 4 * life):
            stepped(ddp, step)
            for name, one in ddp.module.named_parameters():
                applied[name] += one.grad
        kept = {key: value.clone() for key, value in state.state().items()}
        dist.barrier()
        state.close()
    return applied, {name: kept[f"residual/{name}"] for name in applied}, sorted(kept)


def test_a_checkpoint_of_a_synchroniser_goes_on() -> None:
    """What was applied and what is left are all gradients there were."""
    whole = {name: torch.zeros_like(one) for name, one in model().named_parameters()}
    for step in range(8):
        for rank in range(2):
            alone = model()
            alone(batch(step, rank)).square().sum().backward()
            for name, one in alone.named_parameters():
                whole[name] += one.grad
    found = pool(2).run(restored)
    for name, wanted in whole.items():
        left = sum(one[1][name] for one in found).view_as(wanted)
        torch.testing.assert_close(2 * found[0][0][name] + left, wanted, rtol=1e-4, atol=1e-3)
        assert left.abs().max() > 1
    assert {"counters", "residual/0.weight"} <= set(found[0][2])
    assert pool(2).run(empty_state) == ["state: has no counters (valid: what `state()` has given)"] * 2


def empty_state() -> str:
    state = Synchroniser(Choice())
    said = wrong_of(lambda: state.restore({}))
    dist.barrier()
    state.close()
    return said


def explained() -> tuple[str, list[str]]:
    mine = Codec("mine", lambda g: {"a": half(g)}, lambda m: m["a"])
    ddp = DistributedDataParallel(model())
    state = register(ddp, Auto((Way(Choice(mine, "scatter")), Way(Choice(mine), 1.1)), every=2), limit=20.0)
    for step in range(6):
        stepped(ddp, step)
    dist.barrier()
    state.close()
    return state.explain(), [rule.layers for rule in state.rules()]


def test_ones_own_codec_is_explained() -> None:
    for told, layers in pool(2).run(explained):
        assert "mine " in told
        assert sorted(layers) == ["0.bias", "0.weight", "2.bias", "2.weight"]


# --- ends


def closed(choice: Any) -> list[str]:
    """What a step says after the end."""
    ddp = DistributedDataParallel(model())
    state = register(ddp, choice, limit=10.0)
    stepped(ddp, 0)
    dist.barrier()
    state.close()
    state.close()
    try:
        stepped(ddp, 1)
    except (InputError, RuntimeError) as error:
        return [str(error)]
    return ["nothing", str(float(ddp.module[0].weight.grad.abs().sum()) > 0)]


def test_gradients_after_the_end_are_refused_or_left_to_ddp() -> None:
    for (said,) in pool(2).run(closed, Choice(codec("int8"))):
        assert "synchroniser: was closed" in said
    assert pool(2).run(closed, PLAIN) == [["nothing", "True"]] * 2


def registered_twice() -> tuple[str, str]:
    """What is said while a synchroniser looks on, and after it was closed."""
    ddp = DistributedDataParallel(model())
    state = register(ddp, PLAIN, limit=10.0)
    first = wrong_of(lambda: register(ddp, PLAIN, limit=10.0))
    state.close()
    second = wrong_of(lambda: register(ddp, PLAIN, limit=10.0).close())
    return first, second


def test_a_module_has_one_synchroniser() -> None:
    for first, second in pool(2).run(registered_twice):
        assert first.startswith("ddp: has a synchroniser that looks on")
        assert second == "nothing"


def joined_late() -> tuple[int, int]:
    """Processes with different numbers of batches."""
    ddp = DistributedDataParallel(model())
    state = register(ddp, PLAIN, limit=10.0)
    with ddp.join():
        for step in range(4 + 8 * dist.get_rank()):
            stepped(ddp, step)
    dist.barrier()
    state.close()
    return state.step, len(ddp._comm_hooks)


def test_processes_may_run_out_of_data() -> None:
    assert pool(2).run(joined_late) == [(12, 1)] * 2


def unused_and_static() -> tuple[int, int]:
    """A parameter that ends a bucket is never used."""
    whole = nn.ModuleDict({"unused": nn.Linear(8, 8), "used": model()})
    whole.forward = lambda x: whole["used"](x)  # type: ignore[method-assign]
    ddp = DistributedDataParallel(whole, static_graph=True, bucket_cap_mb=0.001)
    state = register(ddp, PLAIN, limit=10.0)
    for step in range(6):
        stepped(ddp, step)
    dist.barrier()
    state.close()
    return state.step, len(state.pilot._tally.now)


def test_a_static_graph_may_leave_parameters_unused() -> None:
    assert pool(2).run(unused_and_static) == [(6, 0)] * 2


def some_modules(every: int) -> str:
    """A sharded module that is not used in every step."""
    whole = model()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (whole[0], whole[2], whole):
        fully_shard(layer, mesh=mesh)
    other = fully_shard(nn.Linear(8, 8), mesh=mesh)
    handle = register_sharded(nn.ModuleList([whole, other]), Auto(every=2), limit=20.0)
    for step in range(40):
        x = whole(batch(step, dist.get_rank()))
        (other(x) if step % every else x).square().sum().backward()
    dist.barrier()
    handle.close()
    return handle.explain()


@pytest.mark.parametrize("every", [2, 3, 7])
def test_modules_that_are_not_always_used_are_no_trouble(every: int) -> None:
    for told in pool(2).run(some_modules, every):
        assert "none" in told


# --- peers


def differing(kind: str) -> str:
    rank = dist.get_rank()
    ddp = DistributedDataParallel(model())
    made: dict[str, Any] = {
        "codec": lambda: register(ddp, Choice(codec("int4" if rank else "int8")), limit=10.0),
        "part": lambda: register(ddp, Choice(codec("topk", part=0.01 + 0.01 * rank)), limit=10.0),
        "auto": lambda: register(ddp, PLAIN if rank else Choice(codec("int8")), limit=10.0),
        "ways": lambda: register(ddp, PLAIN if rank else Auto(every=2), limit=10.0),
        "warm-up": lambda: register(ddp, Choice(), warm_up=((3 + rank, Choice()),), limit=10.0),
        "shards": lambda: register_sharded(
            fully_shard(model(), mesh=dist.init_device_mesh("cpu", (2,))),
            lambda name, _: Choice(codec("int4" if rank and "weight" in name else "int8")),
            limit=10.0,
        ),
    }
    said = wrong_of(made[kind])
    dist.barrier()
    return said


@pytest.mark.parametrize("kind", ["codec", "part", "auto", "ways", "warm-up", "shards"])
def test_ranks_that_want_different_things_are_told(kind: str) -> None:
    for said in pool(2).run(differing, kind):
        assert said.startswith("choice: rank 0 has '")
        assert said.endswith("(valid: the same on all ranks)")


def alone_of_three(how: str) -> tuple[str, tuple[int, ...]]:
    """The third process does not come, or stops in a sum of the backend's."""
    try:
        if how == "does not come":
            if dist.get_rank() == 2:
                time.sleep(6.0)
                return "", ()
            Synchroniser(Choice(codec("int8")), limited(2.0))
            return "no error", ()
        whole = fully_shard(model(), mesh=dist.init_device_mesh("cpu", (3,)))
        handle = register_sharded(whole, PLAIN, limit=2.0)
        for step in range(5):
            loss = whole(batch(step, dist.get_rank())).square().sum()
            if dist.get_rank() == 2 and step == 4:
                loss.register_hook(lambda _: time.sleep(8.0))
            loss.backward()
        del handle
    except PeerLost as error:
        return str(error), error.peers
    return "no error", ()


def limited(limit: float) -> Any:
    from meshwright.compression.sync import Options

    return Options(limit=limit)


def test_who_does_not_come_is_named(losing: Pool) -> None:  # noqa: F811
    for said, peers in answers(losing, alone_of_three, "does not come")[:2]:
        assert said == "rank 2: did not come to synchronise gradients in 2 s"
        assert peers == (2,)


def test_the_limit_holds_for_sums_of_the_backend(losing: Pool) -> None:  # noqa: F811
    for said, peers in answers(losing, alone_of_three, "hangs")[:2]:
        assert "rank 2 (" in said
        assert peers == (2,)


# --- mistakes


def mistaken() -> list[str]:
    ddp, auto = DistributedDataParallel(model()), register
    tries: list[Any] = [
        lambda: auto(ddp, "int8"), lambda: auto(ddp, codec("int8")), lambda: auto(model(), Choice()),
        lambda: auto(ddp, Choice(), lmit=3), lambda: Choice("int8"), lambda: Way("int8"), lambda: Auto((Choice(),)),
        lambda: auto(ddp, Choice(), limit=float("inf")), lambda: auto(ddp, Choice(), limit="5"),
        lambda: auto(ddp, Choice(), node=2.0), lambda: auto(ddp, Choice(), warm_up=(5, Choice())),
        lambda: Codec("mine", lambda g, *, bits=4: {"a": g}, lambda m: m["a"], {"bitz": 8}),
        lambda: Codec("mine", lambda g, *, bits: {"a": g}, lambda m: m["a"]).program,
        lambda: codec("int8").batch([10], device="meta"),
    ]  # fmt: skip
    found = [wrong_of(one) for one in tries]
    state = register(ddp, Choice(), limit=10.0)
    found.append(wrong_of(lambda: register(ddp, Choice(), limit=10.0)))
    dist.barrier()
    state.close()
    return found


def test_mistakes_are_told_in_words() -> None:
    wanted = [
        "choice: is 'int8'", "choice: is Codec", "ddp: is a Sequential", "lmit: unknown option", "codec: is 'int8'",
        "choice: is 'int8'", "ways: has Choice", "limit: is inf", "limit: is '5'", "node: is 2.0", "warm_up: is (5",
        "mine: unknown option 'bitz' (valid: bits)", "mine: option 'bits' has no default", "device: is meta",
        "ddp: has a communication hook already",
    ]  # fmt: skip
    for found in pool(2).run(mistaken):
        assert [one[: len(start)] for one, start in zip(found, wanted, strict=True)] == wanted
