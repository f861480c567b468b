"""Whatever a user writes: nothing but our own errors escapes."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.clusters import Cluster
from meshwright.cost import plan_memory
from meshwright.errors import MeshwrightError
from meshwright.models import Model, presets
from meshwright.plans import Plan

SMALL = {"model": "tiny-moe", "cluster": "2x4xh100", "global_batch": 16, "seq_len": 256, "tp": 2, "pp": 2, "virtual": 2}
FULL = Plan.of(SMALL).to_table()
SHORT = {**SMALL, "stages": [{"layers": "embed..block.0"}, {"layers": "block.1"}, {"layers": "block.2"},
                             {"layers": "block.3..head", "recompute": ["norm"]}], "pp": 2}  # fmt: skip
CLUSTER = {
    "name": "x",
    "group": [
        {"device": "h100", "nodes": 2, "memory_gib": [70, "me"], "tflops": {"bf16": 900}},
        {"device": "mine", "memory_gib": 8, "memory_gb_s": 100, "tflops": {"fp32": 1}, "devices_per_node": 4,
         "link": [{"kind": "pcie", "topology": "cube-mesh", "span": 4, "pairs": ["0-1:1"],
                   "bandwidth_gb_s": 1, "latency_us": 1},
                  {"kind": "ethernet", "topology": "shared", "bandwidth_gb_s": 1, "latency_us": 1}]},
    ],
    "between": {"kind": "ethernet", "topology": "shared", "bandwidth_gb_s": 1, "latency_us": 1},
}  # fmt: skip
odd = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10), st.sampled_from([10**9, 10**18, -(10**30), 0.5, 1e308, float("inf")]),
    st.text(max_size=6), st.sampled_from(["0-3", "block.1", "..", "\ud800", "²", "custom", "expert", "9" * 5000]),
    st.sampled_from([[], {}, [[]]]),
    st.lists(st.integers(0, 3), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(0, 3), max_size=2),
)  # fmt: skip
MANY = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every spot in a nest of dicts and lists."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [spot for key, item in inside for spot in places(item, (*path, key))]


def changed(draw: st.DrawFn, table: Any) -> Any:
    """The table with one to three values replaced, removed or added."""
    table = copy.deepcopy(table)
    for _ in range(draw(st.integers(1, 3))):
        spots = places(table)
        if not spots:
            break
        *way, last = draw(st.sampled_from(spots))
        holder = table
        for step in way:
            holder = holder[step]
        if draw(st.booleans()) or isinstance(holder, list):
            holder[last] = copy.deepcopy(draw(odd))
        elif draw(st.booleans()):
            del holder[last]
        else:
            holder[draw(st.text(max_size=4))] = copy.deepcopy(draw(odd))
    return table


@pytest.mark.parametrize("table", [FULL, SHORT], ids=["full", "short"])
@MANY
@given(data=st.data())
def test_plans(table: dict[str, Any], data: st.DataObject) -> None:
    with contextlib.suppress(MeshwrightError):
        plan = Plan.of(changed(data.draw, table))
        assert plan_memory(plan)[0].total > 0
        assert Plan.parse(plan.to_json()) == plan


@MANY
@given(data=st.data())
def test_clusters(data: st.DataObject) -> None:
    with contextlib.suppress(MeshwrightError):
        cluster = Cluster.from_table(changed(data.draw, CLUSTER))
        assert cluster.link(0, cluster.devices - 1).bandwidth > 0 or cluster.devices == 1


@pytest.mark.parametrize(
    "name",
    ["tiny-gpt2", "tiny-llama", "tiny-moe", "bert-base", "t5-small", "vit-base", "swin-base", "deepseek-v2-lite"],
)
@settings(MANY, max_examples=120)
@given(data=st.data())
def test_configs(name: str, data: st.DataObject) -> None:
    with contextlib.suppress(MeshwrightError):
        assert Model.from_config(changed(data.draw, presets()[name].config)).parameters > 0


@pytest.mark.parametrize("odd_one", [None, 5, [], [1], 1.5, {}, {1: 2}, "", b"x"])
def test_odd_types(odd_one: Any) -> None:
    for read in (Plan.of, Cluster.from_table, Cluster.load, Model.load, Model.from_config):
        with pytest.raises(MeshwrightError):
            read(odd_one)
