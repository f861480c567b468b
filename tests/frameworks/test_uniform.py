"""The nearest plan that cuts every layer alike saves at least as much memory as any layer of the given one."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.frameworks.contract import Inexpressible
from meshwright.frameworks.shared.launch_command import processes
from meshwright.frameworks.shared.nearest_plan import Draft
from meshwright.frameworks.shared.uniform_plan import settle
from meshwright.plans import Plan

JOB = {"model": "tiny-llama", "cluster": "4xh100", "global_batch": 16, "seq_len": 256, "micro_batches": 4}


def settled(*stages: dict[str, Any], **more: Any) -> tuple[Any, tuple[str, ...]]:
    plan = Plan.of(JOB | more | {"stages": list(stages)})
    return settle(plan.resolve(), plan)


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ("none", "selective", "selective"),
        ("selective", "full", "full"),
        (["norm"], "none", ("norm",)),
        (["norm"], "selective", "selective"),
        (["norm"], "full", "full"),
        (["norm"], ["activation"], ("activation", "norm")),
        (["proj"], "selective", ("activation", "norm", "proj")),
    ],
)
def test_recomputation_is_all_that_any_layer_repeats(first: Any, second: Any, both: Any) -> None:
    one = {"layers": "embed..block.1", "recompute": first}
    uniform, missing = settled(one, {"layers": "block.2..head", "recompute": second})
    assert uniform.strategy.recompute == both
    assert len(missing) == 1


def test_a_cut_inside_a_block_moves_behind_it() -> None:
    uniform, missing = settled({"layers": "embed..block.1.attention"}, {"layers": "block.1.mlp..head"})
    assert uniform.blocks == (2, 2)
    assert missing == ("cut inside block.1: moved behind it",)


def test_stages_of_half_a_block_are_dealt_out_or_refused() -> None:
    halves = [
        {"layers": "embed"},
        {"layers": "block.0.attention"},
        {"layers": "block.0.mlp"},
        {"layers": "block.1..head"},
    ]
    uniform, missing = settled(*halves)
    assert uniform.blocks == (1, 1, 1, 1)
    assert "stages of less than a block: blocks are dealt evenly" in missing
    names = ["embed", *(f"block.{i}.{half}" for i in range(4) for half in ("attention", "mlp")), "norm", "head"]
    plan = Plan.of(JOB | {"cluster": "1x11xh100", "stages": [{"layers": name} for name in names]})
    with pytest.raises(Inexpressible, match="11 stages share 4 blocks"):
        settle(plan.resolve(), plan)


def test_stages_on_devices_out_of_order_are_said() -> None:
    stages = [{"layers": "embed..block.1", "devices": "2-3"}, {"layers": "block.2..head", "devices": "0-1"}]
    plan = Plan.of(JOB | {"stages": stages})
    missing = Draft.of(plan.resolve(), plan).missing
    assert missing == ["devices: groups of stages stand on the cluster's devices in order"]


@pytest.mark.parametrize(
    ("cluster", "dp", "started"), [("2x8xh100", 4, (1, 4)), ("2x8xh100", 16, (2, 8)), ("8xh100", 8, (1, 8))]
)
def test_processes_fill_whole_nodes(cluster: str, dp: int, started: tuple[int, int]) -> None:
    plan = Plan.of({"model": "tiny-llama", "cluster": cluster, "global_batch": 16, "dp": dp})
    assert processes(plan.resolve(), plan) == started


@pytest.mark.parametrize("cluster", ["2x8xh100", "1x8xh100+1x4xh100"])
def test_processes_on_part_of_a_node_are_refused(cluster: str) -> None:
    plan = Plan.of({"model": "tiny-llama", "cluster": cluster, "global_batch": 24, "dp": 12})
    with pytest.raises(Inexpressible, match="12 devices are not whole nodes"):
        processes(plan.resolve(), plan)
