"""Products move to finer and coarser types by what their numbers need, everywhere alike, and not to and fro."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshwright as mw
from meshwright.errors import InputError
from meshwright.run.models.dynamic_precision import CHECKS, EVERY, Dynamic, Level
from meshwright.run.models.linear import Product
from meshwright.run.precision.rounding import Rounding, Watch
from tests.run.pool import pool

GOOD, BAD = Rounding(0.0, 0.2), Rounding(0.5, 0.2)
MIDDLE = Rounding(0.03, 0.4)  # between low and high


def gradients(wide: bool, seed: int = 0) -> Tensor:
    """As they are, or all but one so small beside the largest that e5m2 makes them zero (below 2^-16 of 57344)."""
    found = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
    return torch.where(torch.arange(32) == 0, found, found * 1e-12) if wide else found


def checked(dynamic: Dynamic, product: Product, wide: bool, turn: int, healthy: bool = True) -> list[dict[str, str]]:
    """One watched step."""
    dynamic.before(turn * EVERY)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(turn), requires_grad=True)
    product(x).backward(gradients(wide, turn))
    return dynamic.after(turn * EVERY, healthy=healthy)


def fresh() -> tuple[Dynamic, Product]:
    product = Product(16, 32, bias=False)
    torch.nn.init.normal_(product.weight, generator=torch.Generator().manual_seed(1))
    return Dynamic({"block.0.mlp.up": product}, "fp8", "fp8", "cpu"), product


def test_what_is_measured_is_what_the_definition_says() -> None:
    x, weight, grad = torch.randn(8, 16), torch.randn(4, 16), gradients(wide=True)[:8, :4]
    watch = Watch(("fp8", "bf16"), torch.device("cpu"))
    product = torch.nn.functional.linear(x.requires_grad_(), weight)
    watch.saw(x, weight, product)
    product.backward(grad)
    scale = 2.0 ** torch.frexp(grad.abs().max() / 57344).exponent
    back = (grad / scale).to(torch.float8_e5m2).float() * scale
    lost, values, wrong, size = watch.sums[0, 2].tolist()
    assert (lost, values) == (int(((back == 0) & (grad != 0)).sum()), 32)
    assert lost == 24
    assert wrong == pytest.approx(float((grad - back).double().square().sum()), rel=1e-5)
    assert size == pytest.approx(float(grad.double().square().sum()), rel=1e-5)
    plain = Rounding.of(watch.sums[1], "bf16")
    assert plain.lost == 0
    assert 0.1 < plain.error < 0.3  # roundings in units of 2^-7


def test_up_when_gradients_underflow_and_down_again_later() -> None:
    dynamic, product = fresh()
    assert product.computed_in == "fp8"
    moves = [checked(dynamic, product, True, turn) for turn in range(6)]
    up = {"layer": "block.0.mlp.up", "from": "fp8", "to": "bf16"}
    assert moves == [[], [], [up], [], [], []]  # and no further: bfloat16 loses nothing
    assert product.computed_in == "bf16"
    moves = [checked(dynamic, product, False, turn) for turn in range(6, 12)]
    assert [len(some) for some in moves] == [0, 0, 0, 0, 0, 1]  # twice as slowly
    assert product.computed_in == "fp8"
    assert not any(checked(dynamic, product, False, turn) for turn in range(12, 18))


def test_steps_between_are_not_watched() -> None:
    dynamic, product = fresh()
    dynamic.before(EVERY + 1)
    assert product.watch is None
    assert dynamic.after(EVERY + 1, healthy=True) == []


def test_neither_one_bad_check_nor_what_lies_between_moves_anything() -> None:
    level = Level("bf16")
    for here, below in [(BAD, BAD), (BAD, BAD), (GOOD, BAD), (MIDDLE, GOOD), (GOOD, GOOD), (GOOD, MIDDLE)] * 20:
        assert not level.judge(here, below, healthy=True)
    for _ in range(20):
        assert not level.judge(GOOD, GOOD, healthy=False)  # a loss that is not healthy
        assert not level.judge(GOOD, None, healthy=True)  # nothing coarser
    top = Level("fp32")
    assert not any(top.judge(BAD, BAD, healthy=True) for _ in range(20))


def test_numbers_that_come_and_go_move_it_ever_less() -> None:
    level, moves = Level("fp8"), []
    for turn in range(4000):
        bad = turn // 10 % 2 == 0  # ten checks of each
        if level.judge(BAD if bad and level.at == "fp8" else GOOD, BAD if bad else GOOD, healthy=True):
            moves.append(turn)
    assert len(moves) <= 5
    assert moves[-1] < 100
    assert level.at == "bf16"


def test_what_is_not_finite_is_bad() -> None:
    found = Rounding.of(torch.tensor([[0.0, 4.0, torch.nan, torch.nan]] * 3), "fp8")
    assert found.error == torch.inf


def on_a_rank() -> tuple[list[list[dict[str, str]]], str]:
    """Gradients of one process underflow, and each has a product that the other has not."""
    rank = dist.get_rank()
    product, own = Product(16, 32, bias=False), Product(16, 32, bias=False)
    torch.nn.init.normal_(product.weight, generator=torch.Generator().manual_seed(1))
    torch.nn.init.normal_(own.weight, generator=torch.Generator().manual_seed(1))
    dynamic = Dynamic({"both": product, f"of {rank}": own}, "fp8", "fp8", "cpu")
    moves = []
    for turn in range(CHECKS):
        dynamic.before(turn * EVERY)
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(turn))
        product(x).backward(gradients(rank == 1))
        own(x).backward(gradients(rank == 0))
        moves.append(dynamic.after(turn * EVERY, healthy=True))
    return moves, product.computed_in


def test_all_processes_decide_alike() -> None:
    first, second = pool(2).run(on_a_rank)
    assert first == second
    assert first[1] == "bf16"
    assert [move["layer"] for move in first[0][-1]] == ["both", "of 0"]


def plan() -> mw.Plan:
    job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("1xcpu"), 2, seq_len=16, precision="fp32")
    return mw.Plan.of({"micro_batches": 1}, job)


def test_a_run_says_what_moves_and_goes_on_from_there(tmp_path: Path) -> None:
    steps = EVERY * (CHECKS - 1) + 1
    events = mw.train(plan(), steps=steps, dynamic=True, output=str(tmp_path), decay="constant")
    moves = [event for event in events if event["event"] == "precision"]
    products = 2 * len([layer for layer in mw.Model.preset("tiny-llama").layers if layer.block])
    assert [(move["step"], move["from"], move["to"]) for move in moves] == [(steps, "fp32", "bf16")] * products
    fine = mw.train(plan(), steps=steps + 2, decay="constant")
    went_on = mw.train(plan(), steps=steps + 2, dynamic=True, output=str(tmp_path), resume=True, decay="constant")
    ends = [[e["loss"] for e in some if e["event"] == "step"][-2:] for some in (fine, went_on)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-3)
    assert ends[0] != pytest.approx(ends[1], rel=1e-6)  # in bfloat16 from the first step on


def test_float16_is_refused() -> None:
    with pytest.raises(InputError, match="starts at fp16"):
        Dynamic.of({}, "fp16", "cpu")
