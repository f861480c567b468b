"""The short form: what it expands to, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.models import Model
from meshwright.plans import Job, Plan, parse_short
from meshwright.plans.short_form import even_split

JOB = {"model": "llama3-70b", "cluster": "8x8xh100", "global_batch": 512, "seq_len": 8192}


def test_three_degrees() -> None:
    plan = Plan.of({**JOB, "tp": 4, "pp": 2, "dp": 8})
    (pipeline,) = plan.pipelines
    assert [s.devices for s in pipeline.stages] == ["0-31", "32-63"]
    assert [s.spans[0].layers for s in pipeline.stages] == ["embed..block.39", "block.40..head"]
    span = pipeline.stages[0].spans[0]
    assert (span.dp, span.tp, span.sp, span.zero, span.ulysses, span.ring, span.ep) == (8, 4, True, 1, 1, 1, 1)
    assert (pipeline.micro_batches, pipeline.samples, pipeline.schedule.name) == (64, 8, "1f1b")
    assert plan.devices == 64


def test_the_job_may_stand_beside_the_degrees() -> None:
    job = Job(Model.preset("llama3-70b"), Cluster.preset("8x8xh100"), 512, 8192)
    assert Plan.of({"tp": 4, "pp": 2, "dp": 8}, job) == Plan.of({**JOB, "tp": 4, "pp": 2, "dp": 8})


def test_nothing_but_a_job_is_data_parallel() -> None:
    span = Plan.of(JOB).pipelines[0].stages[0].spans[0]
    assert (span.dp, span.zero, span.tp, span.sp) == (64, 1, 1, False)


def test_virtual_stages_go_around_and_v_shapes_go_back() -> None:
    looped = Plan.of({**JOB, "tp": 8, "pp": 4, "virtual": 2}).pipelines[0]
    assert looped.schedule.name == "interleaved"
    assert [s.devices for s in looped.stages] == ["0-15", "16-31", "32-47", "48-63"] * 2
    v_shaped = Plan.of({**JOB, "tp": 8, "pp": 4, "schedule": "zbv"}).pipelines[0]
    assert [s.devices for s in v_shaped.stages] == [
        "0-15",
        "16-31",
        "32-47",
        "48-63",
        "48-63",
        "32-47",
        "16-31",
        "0-15",
    ]


def test_stages_by_hand_may_differ_in_everything() -> None:
    plan = Plan.of(
        {
            "model": "llama3-70b", "cluster": "2x8xh100+2x8xa100-80gb", "global_batch": 64, "seq_len": 4096,
            "micro_batches": 8,
            "stages": [
                {"layers": "embed..block.49", "tp": 8, "dp": 2},
                {"layers": "block.50.attention..block.60.attention", "tp": 8, "dp": 1, "recompute": "full"},
                {"layers": "block.60.mlp..head", "tp": 4, "dp": 2, "zero": 3},
            ],
        }
    )  # fmt: skip
    assert [s.devices for s in plan.pipelines[0].stages] == ["0-15", "16-23", "24-31"]
    assert [s.spans[0].recompute for s in plan.pipelines[0].stages] == ["none", "full", "none"]


@pytest.mark.parametrize(
    ("model", "stages"), [("llama3-70b", 8), ("llama3-70b", 7), ("gpt2", 5), ("t5-large", 6), ("swin-huge", 4)]
)
def test_even_split_deals_whole_blocks_evenly(model: str, stages: int) -> None:
    chain = Model.preset(model)
    parts = even_split(chain, stages)
    assert [i for part in parts for i in part] == list(range(len(chain.layers)))
    blocks = [len({chain.layers[i].block for i in part} - {""}) for part in parts]
    assert sum(blocks) == len(chain.blocks)
    assert max(blocks) - min(blocks) <= 1


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"tp": 3}, "dp", ["3", "64 devices"]),
        ({"tp": 128}, "dp", ["128"]),
        ({"micro_batch": 2, "micro_batches": 3}, "micro_batches", ["3", "contradicts", "4"]),
        ({"micro_batch": 7}, "global_batch", ["512", "448"]),
        ({"pp": 4, "stages": [{"layers": "embed..block.9"}, {"layers": "block.10..head"}]}, "pp", ["4", "2 stages"]),
        ({"virtual": 2, "stages": [{}, {}, {}]}, "stages", ["3", "virtual 2"]),
        ({"stages": [{"layers": "embed..block.9"}, {}]}, "stages[1].layers", ["required"]),
        ({"schedule": "custom"}, "schedule", ["table"]),
        ({"tensor_parallel": 4}, "", ["tensor_parallel"]),
        ({"dp": -8}, "dp", [">= 1"]),
        ({"dp": 8.0}, "dp", ["integer"]),
        ({"recompute": "sometimes"}, "recompute", ["none, selective, full"]),
    ],
)
def test_contradictions(changes: dict[str, Any], field: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        Plan.of({**JOB, **changes})
    assert caught.value.field == field, str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("missing", ["model", "cluster", "global_batch"])
def test_a_plan_belongs_to_a_job(missing: str) -> None:
    with pytest.raises(InputError) as caught:
        Plan.of({key: value for key, value in JOB.items() if key != missing})
    assert caught.value.field == missing


def test_a_job_given_twice_is_a_contradiction() -> None:
    job = Job(Model.preset("llama3-70b"), Cluster.preset("8x8xh100"), 512, 8192)
    with pytest.raises(InputError, match="given beside the plan"):
        Plan.of(JOB, job)


def test_short_text() -> None:
    assert parse_short("tp=8,pp=4,sp=false,schedule=zbv") == {"tp": 8, "pp": 4, "sp": False, "schedule": "zbv"}
    for bad in ("tp", "tp=", "=8", "tp=8,tp=4", "tp==8,"):
        with pytest.raises(InputError):
            Plan.of({**JOB, **parse_short(bad)})


def test_a_micro_batch_divides_over_every_stage() -> None:
    stages = [{"layers": "embed..block.39", "dp": 2, "tp": 8}, {"layers": "block.40..head", "dp": 4, "tp": 4}]
    pipeline = Plan.of({**JOB, "stages": stages}).pipelines[0]
    assert pipeline.samples == 4


def test_devices_written_for_some_stages_only() -> None:
    stages = [
        {"layers": "embed..block.39", "devices": "32-47", "tp": 8},
        {"layers": "block.40..head", "dp": 2, "tp": 8},
    ]
    plan = Plan.of({**JOB, "stages": stages})
    assert [s.devices for s in plan.pipelines[0].stages] == ["32-47", "0-15"]


def test_sequence_parallelism_only_where_the_sequence_divides() -> None:
    job = {"model": "tiny-llama", "cluster": "4xh100", "global_batch": 4, "seq_len": 12, "tp": 2, "ring": 2}
    assert Plan.of(job).pipelines[0].stages[0].spans[0].sp is False
    assert Plan.of({**job, "seq_len": 16}).pipelines[0].stages[0].spans[0].sp is True


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"recompute": ["nothing"]}, "recompute"),
        ({"zero_group": 7}, "zero_group"),
        ({"model": "tiny-moe", "seq_len": 256, "etp": 5, "cluster": "8xh100", "global_batch": 8}, "etp"),
        ({"seq_len": -1}, "seq_len"),
        ({"precision": "bf61"}, "precision"),
        ({"model": {"model_type": "llama"}}, "model.hidden_size"),
        ({"stages": [{"layers": "embed..block.9", "dp": 2, "tp": 8}, {"layers": "block.10..hed"}]}, "stages[1].layers"),
        ({"stages": [{"devices": "0-3,2"}]}, "stages[0].devices"),
        ({"schedule": "zbv", "virtual": 3}, "virtual"),
        ({"schedule": "interleaved"}, "virtual"),
        (
            {
                "pp": 2,
                "stages": [
                    {"layers": "embed..block.9", "devices": "0-3"},
                    {"layers": "block.10..head", "devices": "60-69"},
                ],
            },
            "stages[1].devices",
        ),
        ({"virtual": 2, "dp": 4, "stages": [{"devices": "0-3"}, {"devices": "4-7"}]}, "stages[1].devices"),
    ],
)
def test_errors_name_the_field_as_it_was_written(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        Plan.of({**JOB, **changes})
    assert caught.value.field == field, str(caught.value)


def test_operators_are_repeated_where_they_are() -> None:
    """The first stage of DeepSeek-V3 is dense: it has no experts to repeat, and that is no mistake."""
    table = {"model": "deepseek-v3", "cluster": "61x8xh200", "global_batch": 61, "pp": 61, "tp": 8, "precision": "bf16"}
    plan = Plan.of({**table, "recompute": ["expert_activation"]})
    levels = [stage.spans[0].recompute for stage in plan.pipelines[0].stages]
    assert levels[0] == "none"
    assert levels[-1] == ("expert_activation",)
