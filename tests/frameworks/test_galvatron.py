"""Galvatron cannot be installed beside the rest: files by hand, in the form of its 2.4.0 release, and what they mean.

Form: galvatron/models/gpt_hf/configs/galvatron_config_*_example.json of hetu-galvatron 2.4.0, and what
galvatron/core/runtime/hybrid_parallel_config.py does with it (hp_config_whole_model: `use_sp` turns the tensor-parallel size
into Ulysses, `dp_types_enc` 1 is ZeRO-3, 0 the default type; embedding and head take vtp, vsp, embed_sdp).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.frameworks.contract import Beside, Imported
from meshwright.frameworks.registry import export, read
from meshwright.models import Model
from meshwright.plans import Plan

# Four blocks on two stages of four devices: tp 4, tp 2, Ulysses 2 with ZeRO-3, replicas with recomputation.
MIXED: dict[str, Any] = {
    "pp_deg": 2,
    "tp_sizes_enc": "4,2,2,1",
    "tp_consecutive_flags": "1,0,1,1",
    "dp_types_enc": "0,0,1,0",
    "use_sp": "0,0,1,0",
    "checkpoint": "0,0,0,1",
    "global_bsz": 16,
    "chunks": 2,
    "pp_division": "3,1",
    "pipeline_type": "pipedream_flush",
    "default_dp_type": "zero2",
    "vtp": 2,
    "vsp": 0,
    "embed_sdp": 1,
}
BESIDE = Beside(Cluster.preset("8xh100"), Model.preset("tiny-llama"), seq=256)


def imported(table: dict[str, Any]) -> Imported:
    return read(json.dumps(table), "galvatron", "strategy.json", BESIDE)


def test_a_strategy_per_layer_is_a_span_per_run() -> None:
    found = imported(MIXED)
    assert (found.unknown, found.job.global_batch) == ((), 16)
    first, second = found.plan.pipelines[0].stages
    said = [(s.layers, s.dp, s.tp, s.ulysses, s.zero, s.recompute) for s in first.spans]
    assert said == [
        ("embed", 2, 2, 1, 3, "none"),
        ("block.0", 1, 4, 1, 2, "none"),
        ("block.1", 2, 2, 1, 2, "none"),
        ("block.2", 2, 1, 2, 3, "none"),
    ]
    assert first.spans[2].order == ("dp", "tp", "ulysses", "ring")  # replicas on adjacent devices
    assert [(s.layers, s.dp, s.tp, s.zero, s.recompute) for s in second.spans] == [
        ("block.3", 4, 1, 2, "full"),
        ("norm..head", 2, 2, 3, "full"),
    ]
    assert (second.devices, found.plan.pipelines[0].micro_batches) == ("4-7", 2)


def test_it_is_written_as_it_was_read() -> None:
    found = imported(MIXED)
    exported = export(found.job, found.plan, "galvatron")
    assert exported.missing == ()
    assert json.loads(exported.files["strategy.json"]) == MIXED | {"cp_sizes_enc": "1,1,1,1", "vcp": 1}


def test_what_it_cannot_say_is_listed_layer_by_layer() -> None:
    table = {
        "model": "tiny-llama", "cluster": "4xh100", "global_batch": 16, "seq_len": 256,
        "zero": 1, "recompute": "selective", "offload": {"optimizer": 0.5}, "micro_batches": 4,
    }  # fmt: skip
    plan = Plan.of(table)
    exported = export(plan.resolve(), plan, "galvatron")
    assert [line.partition(":")[0] for line in exported.missing] == ["zero=1", "offload", "recompute"]
    span = exported.plan.pipelines[0].stages[0].spans[0]
    assert (span.zero, span.recompute, span.offload.optimizer) == (2, "full", 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp_sizes_enc": "4,2"}, r"tp_sizes_enc: has 2 numbers \(valid: 4, joined by commas"),
        ({"tp_sizes_enc": "4,2,x,1"}, "tp_sizes_enc: '4,2,x,1' is no row of numbers"),
        ({"tp_sizes_enc": "3,2,2,1"}, "tp_sizes_enc: 3 x context 1 does not divide the 4 devices"),
        ({"pp_deg": 3}, "pp_deg: 3 does not divide the 8 devices"),
        ({"pp_division": "2,1"}, "pp_division: deals out 3 layers; tiny-llama has 4"),
        ({"pipeline_type": "zb"}, r"pipeline_type: is zb \(valid: gpipe, pipedream_flush\)"),
        ({"global_bsz": "many"}, "global_bsz: is a string"),
        ({"chunks": 3}, "3 does not divide the batch of 16"),
    ],
)
def test_bad_files_are_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        imported(MIXED | change)


def test_unknown_names_are_listed() -> None:
    assert imported(MIXED | {"colour": "red"}).unknown == ("colour",)


@st.composite
def strategies(draw: st.DrawFn) -> dict[str, Any]:
    """Any strategy file for four blocks on eight devices."""
    pp = draw(st.sampled_from([1, 2, 4]))
    each = 8 // pp
    sizes = st.sampled_from([d for d in (1, 2, 4) if d <= each])

    def row(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=4, max_size=4))

    tp, flags = row(sizes), st.integers(0, 1)
    cp = [draw(st.sampled_from([d for d in (1, 2, 4) if d * size <= each])) for size in tp]
    ulysses = [draw(flags) if size > 1 else 0 for size in tp]
    adjacent = [1 if size == 1 or used else draw(flags) for size, used in zip(tp, ulysses, strict=True)]
    cuts = sorted(draw(st.sets(st.integers(1, 3), min_size=pp - 1, max_size=pp - 1)))
    vtp = draw(sizes)
    rows = {
        "tp_sizes_enc": tp, "tp_consecutive_flags": adjacent, "cp_sizes_enc": cp, "dp_types_enc": row(flags),
        "use_sp": ulysses, "checkpoint": row(flags),
        "pp_division": [b - a for a, b in zip([0, *cuts], [*cuts, 4], strict=True)],
    }  # fmt: skip
    table: dict[str, Any] = {name: ",".join(map(str, values)) for name, values in rows.items()}
    table |= {"pp_deg": pp, "global_bsz": 32, "chunks": 4, "vtp": vtp, "vsp": draw(flags) if vtp > 1 else 0, "vcp": 1}
    table |= {"pipeline_type": draw(st.sampled_from(["gpipe", "pipedream_flush"])), "embed_sdp": draw(flags)}
    return table | {"default_dp_type": draw(st.sampled_from(["ddp", "zero2"]))}


@given(strategies())
@settings(max_examples=150, deadline=None)
def test_any_file_comes_back_as_it_is(table: dict[str, Any]) -> None:
    """Read as a plan of spans that differ and written again: nothing is missing, every row is the same."""
    found = imported(table)
    exported = export(found.job, found.plan, "galvatron")
    assert exported.missing == ()
    assert exported.plan.pipelines == found.plan.pipelines
    written = json.loads(exported.files["strategy.json"])
    plain = table["dp_types_enc"] != "1,1,1,1" or not table["embed_sdp"]  # else no layer has the default type
    assert {name: written[name] for name in table if plain or name != "default_dp_type"} == {
        name: table[name] for name in table if plain or name != "default_dp_type"
    }
