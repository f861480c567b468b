"""Every mutation that breaks a rule is refused with that rule's name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshwright.clusters import Cluster
from meshwright.errors import InputError, PlanError
from meshwright.models import Model
from meshwright.plans import RULES, Plan, rule_name
from tests.plans.strategies import plans

Table = dict[str, Any]
Draw = Callable[..., Any]


def a_span(table: Table, draw: Draw) -> Table:
    stage = draw(st.sampled_from(table["pipelines"][0]["stages"]))
    return draw(st.sampled_from(stage["spans"]))  # type: ignore[no-any-return]


def unknown_layer(table: Table, draw: Draw) -> None:
    a_span(table, draw)["layers"] = "block.9999"


def lose_the_last_layer(table: Table, draw: Draw) -> None:
    spans = table["pipelines"][0]["stages"][-1]["spans"]
    first, dots, last = spans[-1]["layers"].partition("..")
    assume(dots)
    names = [layer.name for layer in Model.preset(table["job"]["model"]).layers]
    spans[-1]["layers"] = f"{first}..{names[names.index(last) - 1]}"


def repeat_a_layer(table: Table, draw: Draw) -> None:
    stages = table["pipelines"][0]["stages"]
    assume(len(stages) > 1)
    stages[1]["spans"].insert(0, {**stages[1]["spans"][0], "layers": "embed"})


def swap_two_stages_layers(table: Table, draw: Draw) -> None:
    stages = table["pipelines"][0]["stages"]
    assume(len(stages) > 1)
    stages[0]["spans"], stages[1]["spans"] = stages[1]["spans"], stages[0]["spans"]


def device_outside(table: Table, draw: Draw) -> None:
    draw(st.sampled_from(table["pipelines"][0]["stages"]))["devices"] = "5000"


def overlapping_devices(table: Table, draw: Draw) -> None:
    stages = table["pipelines"][0]["stages"]
    assume("-" in stages[0]["devices"] and len(stages) > 1 and stages[1]["devices"] != stages[0]["devices"])
    low, high = stages[0]["devices"].split("-")
    stages[1]["devices"] = f"{int(low) + 1}-{int(high) + 1}"


def wrong_product(table: Table, draw: Draw) -> None:
    span = a_span(table, draw)
    span[draw(st.sampled_from(["dp", "tp", "ulysses", "ring"]))] *= 3


def axis_twice(table: Table, draw: Draw) -> None:
    a_span(table, draw)["order"] = ["tp", "tp", "ring", "dp"]


def virtual_does_not_fit(table: Table, draw: Draw) -> None:
    table["pipelines"][0]["schedule"]["virtual"] += draw(st.sampled_from([2, 5]))


def table_without_custom(table: Table, draw: Draw) -> None:
    table["pipelines"][0]["schedule"]["table"] = [["0F0"]]


def batch_does_not_sum(table: Table, draw: Draw) -> None:
    table["job"]["global_batch"] += draw(st.integers(1, 100))


def micro_batches_do_not_divide(table: Table, draw: Draw) -> None:
    table["pipelines"][0]["schedule"] = {"name": "gpipe", "virtual": 1}
    groups = {stage["devices"] for stage in table["pipelines"][0]["stages"]}
    assume(len(groups) == len(table["pipelines"][0]["stages"]))
    table["pipelines"][0]["micro_batches"] = table["pipelines"][0]["batch"] + 1


def shares_do_not_sum(table: Table, draw: Draw) -> None:
    span = a_span(table, draw)
    span["shares"] = [1] * (span["dp"] + 1)


def ep_without_experts(table: Table, draw: Draw) -> None:
    assume(
        "moe" not in table["job"]["model"]
        and "qwen3-30b" not in table["job"]["model"]
        and "deepseek" not in table["job"]["model"]
    )
    a_span(table, draw)["ep"] = 2


def ep_does_not_divide(table: Table, draw: Draw) -> None:
    a_span(table, draw)["ep"] = 3


def sp_without_tp(table: Table, draw: Draw) -> None:
    span = a_span(table, draw)
    assume(span["tp"] == 1)
    span["sp"] = True


def odd_sequence(table: Table, draw: Draw) -> None:
    assume(
        any(
            s["ring"] > 1 or s["ulysses"] > 1 or s["sp"]
            for stage in table["pipelines"][0]["stages"]
            for s in stage["spans"]
        )
    )
    table["job"]["seq_len"] -= 1


def group_does_not_divide(table: Table, draw: Draw) -> None:
    span = a_span(table, draw)
    span["zero"], span["zero_group"] = 1, span["dp"] * span["ulysses"] * span["ring"] + 1


def group_without_zero(table: Table, draw: Draw) -> None:
    span = a_span(table, draw)
    span["zero"], span["zero_group"] = 0, 1


def unknown_operator(table: Table, draw: Draw) -> None:
    a_span(table, draw)["recompute"] = ["frobnicate"]


def swap_to_itself(table: Table, draw: Draw) -> None:
    stage = table["pipelines"][0]["stages"][0]
    stage["spans"][0]["swap"] = {"to": 0, "activations": 0.5}


def swap_to_nowhere(table: Table, draw: Draw) -> None:
    a_span(table, draw)["swap"] = {"to": 99, "activations": 0.5}


def swap_and_offload_more_than_all(table: Table, draw: Draw) -> None:
    stages = table["pipelines"][0]["stages"]
    assume(len({stage["devices"] for stage in stages}) > 1)
    other = next(i for i, stage in enumerate(stages) if stage["devices"] != stages[0]["devices"])
    stages[0]["spans"][0] |= {"swap": {"to": other, "activations": 0.6}, "offload": {"activations": 0.5}}


def custom_nonsense(table: Table, draw: Draw) -> None:
    pipeline = table["pipelines"][0]
    assume(pipeline["schedule"]["name"] in {"gpipe", "1f1b"})
    pipeline["schedule"] = {"name": "custom", "virtual": 1, "table": [["banana"]] * len(pipeline["stages"])}


def compress_twice(table: Table, draw: Draw) -> None:
    table["compression"] = [{"layers": "embed", "algorithm": "topk"}, {"layers": "embed..head", "algorithm": "sign"}]


def no_fp8_here(table: Table, draw: Draw) -> None:
    table["job"]["cluster"] = table["job"]["cluster"].replace("h100", "a100")
    table["job"]["precision"] = "fp8"


def compress_nothing(table: Table, draw: Draw) -> None:
    table["compression"] = [{"layers": "nowhere", "algorithm": "topk"}]


BREAKS = {
    unknown_layer: "layer-names", lose_the_last_layer: "layer-cover", repeat_a_layer: "layer-cover",
    swap_two_stages_layers: "layer-cover", device_outside: "device-sets", overlapping_devices: "device-sets",
    wrong_product: "degrees", axis_twice: "axis-order", virtual_does_not_fit: "schedule",
    table_without_custom: "schedule", batch_does_not_sum: "batch", micro_batches_do_not_divide: "batch",
    shares_do_not_sum: "batch", ep_without_experts: "experts", ep_does_not_divide: "experts",
    sp_without_tp: "sequence", odd_sequence: "sequence", group_does_not_divide: "zero-groups",
    group_without_zero: "zero-groups", unknown_operator: "recompute", swap_to_itself: "swaps", swap_to_nowhere: "swaps",
    swap_and_offload_more_than_all: "swaps",
    custom_nonsense: "schedule", compress_twice: "compressed-layers",
    no_fp8_here: "precision-supported", compress_nothing: "compressed-layers",
}  # fmt: skip


@pytest.mark.parametrize("mutation", list(BREAKS), ids=lambda m: m.__name__)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_broken_rule_is_named(mutation: Callable[[Table, Draw], None], data: st.DataObject) -> None:
    table = data.draw(plans())
    broken = copy.deepcopy(table)
    mutation(broken, data.draw)
    with pytest.raises(PlanError) as caught:
        Plan.of(broken)
    assert caught.value.rule == BREAKS[mutation], str(caught.value)
    assert caught.value.field
    assert f"[rule: {BREAKS[mutation]}]" in str(caught.value)
    Plan.of(table)  # the plan it was made from is fine


SHORT = {"model": "llama3-70b", "cluster": "2x8xh100", "global_batch": 64, "seq_len": 8192}


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"model": "gpt2", "seq_len": 1024, "tp": 8}, "heads"),  # 12 heads
        ({"model": "qwen2.5-7b", "tp": 14, "cluster": "1x14xh100", "global_batch": 14, "sp": False}, "heads"),  # 4 kv heads
        ({"model": "tiny-moe", "seq_len": 256, "etp": 3, "cluster": "1x3xh100", "global_batch": 3}, "widths"),
        ({"model": {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2,
                       "num_attention_heads": 8, "intermediate_size": 100}, "tp": 8, "dp": 2}, "widths"),
        ({"pp": 100, "cluster": "10x10xh100"}, "stages"),
        ({"cluster": "2x8xv100-32gb"}, "precision-supported"),  # bfloat16 on V100
        ({"cluster": "2x8xv100-32gb", "precision": "tf32"}, "precision-supported"),
        ({"cluster": "2x8xtitan-xp", "precision": "fp16"}, "precision-supported"),  # no 16-bit units at all
        ({"cluster": {"group": [{"device": "x", "memory_gib": 9, "memory_gb_s": 9, "tflops": {"bf16": 9}, "link": [
            {"kind": "ethernet", "topology": "shared", "bandwidth_gb_s": 1, "latency_us": 1}]}]},
          "offload": {"optimizer": 1.0}}, "memory-known"),  # nobody said how large the host is
        ({"precision": "mxfp8"}, "precision-supported"),  # H100 has no block-scaled units
        ({"precision": "nvfp4", "cluster": "2x8xmi355x"}, "precision-supported"),
        ({"dp": 4, "tp": 8}, "degrees"),  # 32 devices of 16
        ({"model": "mixtral-8x7b", "cluster": "3x8xh100", "global_batch": 24, "ep": 4, "zero_group": 4}, "zero-groups"),
    ],
)  # fmt: skip
def test_rules_that_depend_on_the_model(changes: Table, rule: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.of({**SHORT, **changes})
    assert caught.value.rule == rule, str(caught.value)


def test_a_traced_module_cannot_be_cut() -> None:
    import torch
    from torch import nn

    model = Model.from_module(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.zeros(2, 8))
    table = {"model": dict(model.reference), "cluster": "4xh100", "global_batch": 8}  # type: ignore[arg-type]
    assert Plan.of({**table, "pp": 2}).devices == 4
    with pytest.raises(PlanError) as caught:
        Plan.of({**table, "tp": 2, "sp": False})
    assert caught.value.rule == "tensor-parallel"


def test_unknown_memory_is_refused() -> None:
    from dataclasses import replace

    from meshwright.plans import Job

    cluster = Cluster.preset("8xh100")
    group = cluster.groups[0]
    blind = replace(cluster, groups=(replace(group, device=replace(group.device, memory=0)),))
    job = Job(Model.preset("tiny-llama"), blind, 8)
    with pytest.raises(PlanError) as caught:
        Plan.of({}, job)
    assert caught.value.rule == "memory-known"


def test_every_rule_is_tested() -> None:
    """A rule without a test that breaks it would be a rule nobody has seen work."""
    tested = set(BREAKS.values()) | {"heads", "widths", "tensor-parallel", "memory-known", "precision-supported"}
    assert tested == {rule_name(rule) for rule in RULES}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda t: t.pop("job"), "job"),
        (lambda t: t.update(version=99), "version"),
        (lambda t: t.update(version="one"), "version"),
        (lambda t: t.update(pipelines=[]), "pipelines"),
        (lambda t: t["job"].update(global_batch=-1), "job.global_batch"),
        (lambda t: t["job"].update(global_batch=10**30), "job.global_batch"),
        (lambda t: t["job"].update(model="lama"), "job.model"),
        (lambda t: t["job"].update(cluster="8x8xh1000"), "job.cluster"),
        (lambda t: t["job"].update(precision="bf61"), "job.precision"),
        (lambda t: t["job"].update(optimizer="adamx"), "job.optimizer"),
        (lambda t: t["pipelines"][0].update(schedule={"name": "2f2b"}), "pipelines[0].schedule.name"),
        (lambda t: t["pipelines"][0]["stages"][0].update(device="0-7"), "pipelines[0].stages[0]"),
        (lambda t: t["pipelines"][0]["stages"][0]["spans"][0].update(tp=0), "pipelines[0].stages[0].spans[0].tp"),
        (lambda t: t["pipelines"][0]["stages"][0]["spans"][0].update(tp="8"), "pipelines[0].stages[0].spans[0].tp"),
        (lambda t: t["pipelines"][0]["stages"][0]["spans"][0].update(zero=4), "pipelines[0].stages[0].spans[0].zero"),
        (lambda t: t["pipelines"][0]["stages"][0]["spans"][0].update(offload={"activations": 2}),
         "pipelines[0].stages[0].spans[0].offload.activations"),
        (lambda t: t["pipelines"][0]["stages"][0].update(devices="7-0"), "pipelines[0].stages[0].devices"),
        (lambda t: t["pipelines"][0]["stages"][0].update(devices="0-7,3"), "pipelines[0].stages[0].devices"),
    ],
)  # fmt: skip
def test_wrong_types_and_values_name_the_field(change: Callable[[Table], object], field: str) -> None:
    table = Plan.of({**SHORT, "tp": 8}).to_table()
    change(table)
    with pytest.raises(InputError) as caught:
        Plan.of(table)
    assert caught.value.field == field, str(caught.value)


def test_the_same_devices_in_other_words() -> None:
    table = Plan.of({**SHORT, "cluster": "2xh100", "global_batch": 8, "pp": 1, "virtual": 2, "dp": 2}).to_table()
    assert table["pipelines"][0]["stages"][1]["devices"] == "0-1"
    table["pipelines"][0]["stages"][1]["devices"] = "0,1"
    assert Plan.of(table).devices == 2


def test_a_plan_is_not_checked_against_another_job() -> None:
    from meshwright.plans import Job

    table = Plan.of({**SHORT, "tp": 8}).to_table()
    with pytest.raises(InputError, match="differs from the job"):
        Plan.of(table, Job(Model.preset("llama3-8b"), Cluster.preset("2x8xh100"), 64, 8192))
    assert Plan.of(table, Plan.of(table).resolve()) == Plan.of(table)


@pytest.mark.parametrize("layers", ["", "..", "embed..", "..head", " "])
def test_spans_without_a_name(layers: str) -> None:
    table = Plan.of({**SHORT, "tp": 8}).to_table()
    table["pipelines"][0]["stages"][0]["spans"][0]["layers"] = layers
    with pytest.raises(PlanError) as caught:
        Plan.of(table)
    assert caught.value.rule == "layer-names"
