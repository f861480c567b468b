"""Memory of plans: against published ZeRO figures and arithmetic written out by hand."""

from __future__ import annotations

import pytest

from meshwright.clusters import Cluster
from meshwright.cost import fits, plan_memory, runtime
from meshwright.cost.memory.transient import transient
from meshwright.errors import DoesNotFit
from meshwright.models import Model, Slice
from meshwright.plans import Job, Plan

P = 6_738_415_616  # Llama-7B


def memory(**table: object):  # type: ignore[no-untyped-def]
    base = {"model": "llama-7b", "cluster": "8x8xh100", "global_batch": 64, "seq_len": 2048}
    return plan_memory(Plan.of({**base, **table}), runtime=runtime("megatron"))


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


def test_fsdp_keeps_one_copy_of_sharded_parameters() -> None:
    """Float32 shards are the master copy and are cast as they are gathered: 4 + 4 + 8 bytes instead of 2 + 4 + 12."""
    table = {"model": "llama-7b", "cluster": "8x8xh100", "global_batch": 128, "seq_len": 2048, "zero": 3}
    (found,) = plan_memory(Plan.of(table), runtime=runtime("fsdp"))
    assert (found.parameters, found.gradients, found.optimizer) == (4 * P // 64, 4 * P // 64, 8 * P // 64)


def test_gradients_of_one_micro_batch_take_the_place_of_activations() -> None:
    """The backward pass frees a layer's activations as it makes its gradients; those of a second one find them there."""
    table = {"model": "llama-7b", "cluster": "1xh200", "seq_len": 16384, "zero": 0}
    once, twice = (plan_memory(Plan.of({**table, "global_batch": batch}))[0] for batch in (1, 2))
    assert twice.gradients == 4 * P
    vocabulary = (
        2 * 32000 * 4096
    )  # bytes; blocks keep more than their gradients need, the embedding and the head nothing
    assert once.gradients == 2 * vocabulary
    full = plan_memory(Plan.of({**table, "global_batch": 1, "recompute": "full"}))[0]
    assert full.gradients + full.activations == pytest.approx(2 * P, rel=0.02)  # where little is kept, gradients decide


def test_megatron_has_room_for_all_gradients_from_the_start() -> None:
    (found,) = memory(zero=0)
    assert found.gradients == 4 * P


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
    found = plan_memory(Plan.of({"model": "llama3-70b", "cluster": "8xh100", "global_batch": 16, "seq_len": 8192}))
    with pytest.raises(DoesNotFit) as caught:
        fits(found)
    assert caught.value.short_by_bytes == found[0].total - found[0].capacity > 0
    assert "parameters" in str(caught.value) or "gradients" in str(caught.value)


def with_swap(fraction: float, to: int = 1, stage: int = 0) -> list:  # type: ignore[type-arg]
    table = Plan.of(
        {"model": "llama-7b", "cluster": "8x8xh100", "global_batch": 64, "seq_len": 2048, "pp": 2}
    ).to_table()
    table["pipelines"][0]["stages"][stage]["spans"][0]["swap"] = {"to": to, "activations": fraction}
    return plan_memory(Plan.of(table), runtime=runtime("megatron"))


def test_swapped_activations_are_somewhere() -> None:
    """What leaves one stage arrives at the other: the sum over both stays, but for the block that is running."""
    before, after = memory(pp=2), with_swap(0.5)
    moved = before[0].activations - after[0].activations
    assert after[1].swapped_in == moved > 0
    assert sum(m.activations + m.swapped_in for m in after) == sum(m.activations for m in before)


def test_offload_fills_the_host() -> None:
    (found,) = memory(zero=1, offload={"optimizer": 1.0, "activations": 0.5})
    (whole,) = memory(zero=1)
    assert found.host == whole.optimizer + whole.activations - found.activations
    assert found.host_capacity == 2048 * 2**30 // 8


def test_a_full_host_does_not_fit() -> None:
    cluster = {"group": [{"device": "h100", "devices_per_node": 8, "host_memory_gib": 1}]}
    table = {"model": "llama3-8b", "cluster": cluster, "global_batch": 8, "seq_len": 1024, "tp": 8}
    fits(plan_memory(Plan.of(table)))
    with pytest.raises(DoesNotFit, match="host memory"):
        fits(plan_memory(Plan.of({**table, "offload": {"optimizer": 1.0}})))


def test_offloaded_parameters_are_fetched_to_run() -> None:
    (found,) = memory(zero=0, offload={"parameters": 1.0})
    block = 2 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096)
    assert found.parameters == 0
    assert found.communication == 2 * block


def test_zero_3_on_one_device_gathers_nothing() -> None:
    table = {"model": "llama3-8b", "cluster": "1xh100", "global_batch": 1, "seq_len": 1024}
    assert plan_memory(Plan.of({**table, "zero": 3})) == plan_memory(Plan.of({**table, "zero": 0}))


def test_shares_are_judged_on_the_devices_that_take_them() -> None:
    """A large device may take a large share without the small one being charged for it."""
    table = {"model": "llama-7b", "cluster": "1x1xh200+1x1xl4", "global_batch": 8, "seq_len": 2048, "micro_batches": 1}
    table |= {"optimizer": "sgd", "precision": "bf16", "recompute": "full"}
    rows = {s: plan_memory(Plan.of({**table, "stages": [{"dp": 2, "shares": s}]}))[0] for s in ((7, 1), (1, 7))}
    l4 = round(22.49 * 2**30)
    assert rows[(7, 1)].capacity == pytest.approx(l4, rel=1e-3)  # the L4 is still the fullest for its size ...
    one = memory_of_one_sample()
    assert rows[(7, 1)].activations == one  # ... with one sample
    assert rows[(1, 7)].activations == 7 * one


def memory_of_one_sample() -> int:
    table = {"model": "llama-7b", "cluster": "1xh200", "global_batch": 1, "seq_len": 2048, "recompute": "full"}
    return plan_memory(Plan.of(table))[0].activations


def test_a_span_that_turns_to_full_inside_a_block_keeps_its_input() -> None:
    table = {"model": "llama-7b", "cluster": "1xh100", "global_batch": 1, "seq_len": 2048}
    full = Plan.of(table).to_table()
    span = full["pipelines"][0]["stages"][0]["spans"][0]
    attention = {**span, "layers": "embed..block.0.attention"}
    rest = {**span, "layers": "block.0.mlp..head", "recompute": "full"}
    full["pipelines"][0]["stages"][0]["spans"] = [attention, rest]
    token = 2048 * 4096 * 2
    layer = Model.preset("llama-7b").layer("block.0.attention")
    expected = layer.kept_bytes(Slice(1, 2048)) + (1 + 31 + 2) * token  # the half block, 31 blocks, norm, head
    assert plan_memory(Plan.of(full))[0].activations == expected


def test_t5_keeps_one_copy_of_what_the_encoder_said() -> None:
    table = {"model": "t5-large", "cluster": "2xh100", "global_batch": 2, "seq_len": 512, "recompute": "full"}
    cut = [{"layers": "embed..encoder.norm"}, {"layers": "decoder.embed..head"}]
    decoder = plan_memory(Plan.of({**table, "stages": cut}))[1]
    token = 512 * 1024 * 2
    assert decoder.activations == (24 + 2 + 1) * token  # 24 block inputs, norm, head, and the encoder's output
    embedding = 2 * 32128 * 1024
    own = sum(layer.parameters for layer in Model.preset("t5-large").layers if layer.name.startswith("decoder"))
    assert decoder.parameters == 2 * own + embedding  # decoder.embed and head share one copy


def test_frozen_parameters_have_no_gradients() -> None:
    import torch
    from torch import nn

    module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    for part in list(module)[:3]:
        part.weight.requires_grad_(False)
    job = Job(Model.from_module(module, torch.zeros(2, 8)), Cluster.preset("1xh100"), 2)
    (found,) = plan_memory(Plan.of({}, job), job)
    assert (found.parameters, found.gradients, found.optimizer) == (2 * 256, 4 * 64, 12 * 64)


def test_uneven_virtual_stages_are_weighed_not_counted() -> None:
    """Interleaved, 7 blocks in an early stage and 2 in a late one: eight of the first and one of the second is most."""
    sizes = [4, 7, 4, 4, 4, 2, 4, 3]
    ends = [sum(sizes[: i + 1]) for i in range(8)]
    names = [f"block.{a}..block.{b - 1}" for a, b in zip([0, *ends], ends, strict=False)]
    names[0], names[-1] = f"embed..block.{ends[0] - 1}", f"block.{ends[-2]}..head"
    table = {"model": "llama3-8b", "cluster": "4xh100", "global_batch": 16, "seq_len": 4096, "virtual": 2}
    group = plan_memory(Plan.of({**table, "stages": [{"layers": name} for name in names]}))[1]
    block = sum(
        layer.kept_bytes(Slice(1, 4096)) for layer in Model.preset("llama3-8b").layers if layer.block == "block.5"
    )
    assert group.activations == (8 * 7 + 1 * 2) * block


def mixtral_communication(**changes: object) -> float:
    table = {"model": "mixtral-8x7b", "cluster": "8xh100", "global_batch": 8, "seq_len": 1024, "zero": 3, **changes}
    return plan_memory(Plan.of(table))[0].communication


def test_experts_are_gathered_where_they_are_sharded() -> None:
    experts, head = 8 * 3 * 4096 * 14336, 32000 * 4096
    # tp 8: one replica of the dense part, eight of the experts, which are gathered (twice) with whole gradients
    gathered_input = 1024 * 4096 * 2  # by sequence parallelism
    assert mixtral_communication(tp=8, dp=1) == (2 * 2 + 4) * experts + gathered_input
    # ep 8: each device holds its own experts; only the dense part is gathered, the largest piece being the head
    assert mixtral_communication(dp=8, ep=8) == (2 * 2 + 4) * head


def test_a_short_host_is_seen_whichever_group_comes_first() -> None:
    big, small = ({"device": "h100", "devices_per_node": 1, "host_memory_gib": gib} for gib in (2000, 10))
    table = {"model": "llama3-8b", "global_batch": 2, "seq_len": 1024, "offload": {"optimizer": 1.0}, "zero": 1}
    for groups in ([big, small], [small, big]):
        assert plan_memory(Plan.of({**table, "cluster": {"group": groups}}))[0].host_short_by > 0


def test_shares_of_every_virtual_stage_count() -> None:
    table = {"model": "tiny-llama", "cluster": "2xh100", "global_batch": 8, "micro_batches": 1, "virtual": 2}
    for shares in ([1, 7], [7, 1]):
        stages = [{"layers": "embed..block.1", "dp": 2}, {"layers": "block.2..head", "dp": 2, "shares": shares}]
        assert plan_memory(Plan.of({**table, "stages": stages}))[0].activations == busiest()


def busiest() -> int:
    model, cut = Model.preset("tiny-llama"), Slice(1, 256, whole_logits=False)
    first = sum(layer.kept_bytes(cut) for layer in model.layers[:5])
    return round(4 * first + 7 * sum(layer.kept_bytes(cut) for layer in model.layers[5:]))


def test_the_encoder_counts_once_however_the_decoder_is_split() -> None:
    base = {"model": "t5-large", "cluster": "2xh100", "global_batch": 2, "seq_len": 512}
    stages = [{"layers": "embed..encoder.norm"}, {"layers": "decoder.embed..head"}]
    table = Plan.of({**base, "stages": stages}).to_table()
    whole = plan_memory(Plan.of(table))[1].activations
    span = table["pipelines"][0]["stages"][1]["spans"][0]
    parts = ("decoder.embed", "decoder.block.0..decoder.block.5", "decoder.block.6..head")
    table["pipelines"][0]["stages"][1]["spans"] = [{**span, "layers": part} for part in parts]
    assert plan_memory(Plan.of(table))[1].activations == whole


def test_swap_with_uneven_shares_conserves_bytes() -> None:
    table = {"model": "llama-7b", "cluster": "8xh100", "global_batch": 16, "seq_len": 1024, "micro_batches": 1}
    first = {"layers": "embed..block.15", "dp": 4, "shares": [13, 1, 1, 1], "swap": {"to": 1, "activations": 0.5}}
    found = plan_memory(Plan.of({**table, "stages": [first, {"layers": "block.16..head", "dp": 4}]}))
    per_sample = sum(layer.kept_bytes(Slice(1, 1024)) for layer in Model.preset("llama-7b").layers[:33])
    assert found[1].swapped_in == pytest.approx(16 * per_sample / 2 / 4)


@pytest.mark.parametrize(("seq_len", "chunk"), [(2048, 2048), (8192, 4096), (131072, 16384)])
def test_a_loss_in_chunks_needs_the_logits_of_one(seq_len: int, chunk: int) -> None:
    """16-bit logits of a chunk of tokens, or later the float32 copy of the gradient of the head's weight, beside that
    gradient; of one micro-batch it is the gradient that stays. Nothing of the logits is kept."""
    table = {"model": "llama3-8b", "cluster": "1xh200", "global_batch": 1, "seq_len": seq_len}
    full = Plan.of({**table, "recompute": "full"}).to_table()
    spans = full["pipelines"][0]["stages"][0]["spans"]
    full["pipelines"][0]["stages"][0]["spans"] = [{**spans[0], "layers": "embed..norm"}, {**spans[0], "layers": "head"}]
    job = Plan.of(full).resolve()
    head = Plan.of(full).pipelines[0].stages[0].spans[1]
    ours, weight, logits = runtime("meshwright"), 128256 * 4096, 2 * chunk * 128256
    assert transient(job, head, 1, ours).working == max(logits, 4 * weight) + 2 * weight
    assert transient(job, head, 1, ours, once=True).working == logits
    assert head.cut(1, seq_len, "bf16").whole_logits  # what a loss that is not in chunks keeps:
    kept = job.model.layer("head").kept_bytes(head.cut(1, seq_len, "bf16"))
    assert kept == 4 * seq_len * 128256
