"""Memory of plans: against published ZeRO figures and arithmetic written out by hand."""

from __future__ import annotations

import pytest

from meshwright.cost import fits, plan_memory
from meshwright.errors import DoesNotFit
from meshwright.model import Model, Slice
from meshwright.plan import Plan

P = 6_738_415_616  # Llama-7B


def memory(**table: object):  # type: ignore[no-untyped-def]
    base = {"model": "llama-7b", "cluster": "8x8xh100", "global_batch": 64, "seq_len": 2048}
    return plan_memory(Plan.of({**base, **table}))


# Rajbhandari et al. 2020, figure 1: with K bytes of optimizer state, psi parameters and N devices,
# (2 + 4) psi + K psi / N, 2 psi + (4 + K) psi / N, (2 + 4 + K) psi / N; gradients in float32 here, K = 12.
@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer"),
    [(0, 2, 4, 12), (1, 2, 4, 12 / 64), (2, 2, 4 / 64, 12 / 64), (3, 2 / 64, 4 / 64, 12 / 64)],
)
def test_zero_levels(zero: int, parameters: float, gradients: float, optimizer: float) -> None:
    (found,) = memory(zero=zero)
    assert found.parameters == pytest.approx(parameters * P, abs=1)
    assert found.gradients == pytest.approx(gradients * P, abs=1)
    assert found.optimizer == pytest.approx(optimizer * P, abs=1)


def test_hybrid_groups_shard_less() -> None:
    (found,) = memory(zero=3, zero_group=8)
    assert found.optimizer == pytest.approx(12 * P / 8, abs=1)


@pytest.mark.parametrize(
    ("optimizer", "precision", "size"),
    [
        ("adamw", "fp32", 8),
        ("adamw", "bf16", 12),
        ("adamw-8bit", "bf16", 6),
        ("sgd", "fp32", 0),
        ("sgd-momentum", "bf16", 8),
        ("muon", "bf16", 8),
    ],
)
def test_optimizers(optimizer: str, precision: str, size: int) -> None:
    (found,) = memory(zero=0, optimizer=optimizer, precision=precision)
    assert found.optimizer == size * P


def test_stages_hold_all_parameters_once() -> None:
    groups = memory(tp=4, pp=4, virtual=2, zero=0, dp=4)
    norms = 2 * 32 * 4096 + 4096  # whole on every tensor-parallel device
    assert sum(g.parameters for g in groups) * 4 == 2 * (P + 3 * norms)


def test_a_tied_head_far_from_its_embedding_is_a_second_copy() -> None:
    table = {"model": "gpt2-xl", "cluster": "2xh100", "global_batch": 2, "seq_len": 1024, "zero": 0}
    together = plan_memory(Plan.of({**table, "dp": 2}))[0].parameters
    apart = sum(m.parameters for m in plan_memory(Plan.of({**table, "pp": 2})))
    assert together == 2 * 1_557_611_200
    assert apart - together == 2 * 50257 * 1600


def test_experts_are_sharded_over_their_own_replicas() -> None:
    """Mixtral on 16 devices, tp 2, ep 8: experts / 8 with 2 replicas, the rest / 2 with 8 replicas."""
    table = {
        "model": "mixtral-8x7b",
        "cluster": "2x8xh100",
        "global_batch": 16,
        "seq_len": 4096,
        "tp": 2,
        "ep": 8,
        "zero": 1,
    }
    (found,) = plan_memory(Plan.of(table))
    experts = 32 * 8 * 3 * 4096 * 14336
    whole = 32 * (2 * 4096 + 8 * 4096) + 4096  # norms and routers
    dense = (46_702_792_704 - experts - whole) // 2 + whole
    assert found.parameters == 2 * (experts // 8 + dense)
    assert found.optimizer == pytest.approx(12 * (experts / 8 / 2 + dense / 8), abs=2)


@pytest.mark.parametrize(("schedule", "held"), [("gpipe", [8, 8, 8, 8]), ("1f1b", [4, 3, 2, 1])])
def test_activations_follow_the_schedule(schedule: str, held: list[int]) -> None:
    """Four equal stages in the middle of a model: take embedding and head away by comparing inner stages."""
    groups = memory(pp=4, dp=16, global_batch=128, schedule=schedule)
    blocks = {f"block.{i}" for i in range(8, 16)}
    layers = [layer for layer in Model.preset("llama-7b").layers if layer.block in blocks]
    per_micro_batch = sum(layer.kept_bytes(Slice(1, 2048, "bf16")) for layer in layers)
    assert groups[1].activations == held[1] * per_micro_batch
    assert groups[2].activations == held[2] * per_micro_batch
    assert groups[0].activations == held[0] * per_micro_batch


def test_full_recompute_keeps_block_inputs_and_one_block_working() -> None:
    (found,) = memory(zero=0, recompute="full")
    token = 2048 * 4096 * 2
    head = 2048 * 32000 * 4  # logits of the last micro-batch live in the working set
    assert found.activations == (32 + 2) * token  # one input per block, one for the norm, one for the head
    assert found.working >= head - token


def test_a_stage_that_begins_inside_a_block_keeps_what_it_received() -> None:
    table = {"model": "llama-7b", "cluster": "2xh100", "global_batch": 2, "seq_len": 2048, "recompute": "full"}
    split = [{"layers": "embed..block.15.attention"}, {"layers": "block.15.mlp..head"}]
    groups = plan_memory(Plan.of({**table, "stages": split}))
    token = 2048 * 4096 * 2
    assert groups[0].activations == 2 * 16 * token  # two micro-batches in flight, blocks 0-15
    assert groups[1].activations == (1 + 16 + 2) * token  # the received half block, blocks 16-31, norm, head


def test_offload_and_swap_take_their_part_away() -> None:
    whole = memory(pp=2, zero=1)
    less = memory(pp=2, zero=1, offload={"activations": 0.25, "optimizer": 1.0})
    assert less[0].optimizer == 0
    assert less[0].activations == pytest.approx(0.75 * whole[0].activations, abs=1)
    table = Plan.of(
        {"model": "llama-7b", "cluster": "8x8xh100", "global_batch": 64, "seq_len": 2048, "pp": 2}
    ).to_table()
    table["pipelines"][0]["stages"][0]["spans"][0]["swap"] = {"to": 1, "activations": 0.5}
    assert plan_memory(Plan.of(table))[0].activations == pytest.approx(0.5 * whole[0].activations, abs=1)


def test_uneven_shares_count_the_busiest_replica() -> None:
    table = {"model": "llama-7b", "cluster": "4xh100", "global_batch": 8, "seq_len": 2048, "micro_batches": 1}
    even = plan_memory(Plan.of({**table, "dp": 4}))[0].activations
    uneven = plan_memory(Plan.of({**table, "stages": [{"dp": 4, "shares": [4, 2, 1, 1]}]}))[0].activations
    assert uneven == 2 * even


def test_a_mixed_stage_is_as_large_as_its_smallest_device() -> None:
    table = {"model": "tiny-llama", "cluster": "1x8xh100+1x8xl4", "global_batch": 16}
    assert plan_memory(Plan.of(table))[0].capacity == pytest.approx(23034 * 2**20, rel=1e-3)  # nvidia-smi on an L4


def test_what_does_not_fit_says_by_how_much() -> None:
    found = plan_memory(Plan.of({"model": "llama3-70b", "cluster": "8xh100", "global_batch": 8, "seq_len": 8192}))
    with pytest.raises(DoesNotFit) as caught:
        fits(found)
    assert caught.value.short_by_bytes == found[0].total - found[0].capacity > 0
    assert "parameters" in str(caught.value) or "gradients" in str(caught.value)
