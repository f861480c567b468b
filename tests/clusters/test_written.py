"""Clusters as strings and as TOML files, good and bad."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.clusters import Cluster, device_names
from meshwright.errors import InputError, UnknownName

GOOD = """
name = "lab"
[[group]]
nodes = 2
devices_per_node = 8
device = "a100-80gb"
memory_gib = [76, "measured"]
tflops = { bf16 = 250 }
[[group]]
device = "mychip"
nodes = 4
devices_per_node = 2
memory_gib = 64
memory_gb_s = 1000
tflops = { fp16 = 100, fp32 = 10 }
[[group.link]]
kind = "package"
topology = "package"
span = 2
bandwidth_gb_s = 200
latency_us = 1
[[group.link]]
kind = "ethernet"
topology = "shared"
bandwidth_gb_s = 12.5
latency_us = 30
[between]
kind = "ethernet"
topology = "shared"
bandwidth_gb_s = 1.25
latency_us = 50
"""


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 16), st.sampled_from(device_names())), min_size=1, max_size=4)
)
def test_strings_mean_what_they_say(groups: list[tuple[int, int, str]]) -> None:
    cluster = Cluster.preset("+".join(f"{n}x{d}x{kind}" for n, d, kind in groups))
    assert cluster.devices == sum(n * d for n, d, _ in groups)
    kinds = [kind for n, d, kind in groups for _ in range(n * d)]
    for rank in {0, cluster.devices // 2, cluster.devices - 1}:
        assert cluster.device(rank).name == kinds[rank]
    assert Cluster.load(cluster.reference) == cluster


def test_shorter_strings() -> None:
    """So many devices mean the servers they are sold in: nobody has 64 devices in one node."""
    for text, nodes, each in (
        ("h100", 1, 1),
        ("8xh100", 1, 8),
        ("64xh100", 8, 8),
        ("8xgb200", 2, 4),
        ("4 x H100", 1, 4),
    ):
        group = Cluster.preset(text).groups[0]
        assert (group.nodes, group.devices_per_node) == (nodes, each), text


@pytest.mark.parametrize(
    "text", ["", "x", "8x8", "8x8xh10", "8x8xh100+", "+h100", "0x8xh100", "8x0xh100", "-1x8xh100", "1.5x8xh100",
             "9999999x9999999xh100", "9" * 5000 + "xh100", "8x8x8xh100", "8x8xh100;rm", "8×8×h100", "12xh100", "٣xh100"],
)  # fmt: skip
def test_bad_strings(text: str) -> None:
    with pytest.raises(InputError) as caught:
        Cluster.preset(text)
    assert caught.value.valid


def test_an_unknown_device_offers_the_closest() -> None:
    with pytest.raises(UnknownName) as caught:
        Cluster.preset("8x8xa10080gb")
    assert "a100-80gb" in caught.value.closest


def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(GOOD)
    cluster = Cluster.load(path)
    assert (cluster.name, cluster.devices) == ("lab", 24)
    first, second = cluster.groups
    assert first.device.memory == 76 * 2**30
    assert first.device.flops["bf16"] == 250e12
    assert first.device.flops["fp32"] == 19.5e12  # the catalogue's, since the file leaves it
    assert first.device.sources["memory_gib"] == "measured"
    assert cluster.link(0, 8).kind == "infiniband"
    assert cluster.link(16, 17).kind == "package"
    assert cluster.link(17, 18).bandwidth == 12.5e9
    assert second.network.aggregate == 12.5e9  # one shared adapter
    assert cluster.link(0, 23).bandwidth == 1.25e9
    assert Cluster.load(cluster.reference) == cluster


def test_without_between_the_slower_network_joins_two_groups() -> None:
    cluster = Cluster.preset("1x8xh100+1x4xtitan-xp")
    assert cluster.link(0, 11) == cluster.groups[1].network


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (("nodes = 2", "nodes = -2"), "group[0].nodes", [">= 1"]),
        (("nodes = 2", "nodes = 2.5"), "group[0].nodes", ["integer"]),
        (("nodes = 2", "nodez = 2"), "group[0]", ["nodez", "did you mean nodes"]),
        (("[76", "[-76"), "group[0].memory_gib", ["-76"]),
        (("tflops = { bf16 = 250 }", "tflops = { bf17 = 250 }"), "group[0]", ["bf17", "bf16"]),
        (
            ('"shared"\nbandwidth_gb_s = 12.5', '"shard"\nbandwidth_gb_s = 12.5'),
            "group[1].link[1].topology",
            ["shared"],
        ),
        (("bandwidth_gb_s = 200", "bandwidth_gb_s = 0"), "group[1].link[0].bandwidth_gb_s", ["> 0"]),
        (("span = 2\n", ""), "group[1].link[0].span", ["only the last"]),
        (("memory_gib = 64\n", ""), "group[1].device", ["mychip", "memory_gib"]),
        (("memory_gib = 64", 'memory_gib = "64 GB"'), "group[1].memory_gib", ["a number"]),
        (('topology = "package"', 'topology = "cube-mesh"'), "group[1].link[0].pairs", ["cube-mesh"]),
        (("nodes = 4", "nodes = 999999"), "group", ["devices"]),
    ],
)
def test_bad_toml(tmp_path: Path, change: tuple[str, str], field: str, words: list[str]) -> None:
    path = tmp_path / "lab.toml"
    assert change[0] in GOOD
    path.write_text(GOOD.replace(*change, 1))
    with pytest.raises(InputError) as caught:
        Cluster.load(path)
    assert caught.value.file == str(path)
    assert caught.value.field == field
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_malformed_toml_has_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text('name = "lab"\n[[group]\nnodes = 2\n')
    with pytest.raises(InputError) as caught:
        Cluster.load(path)
    assert (caught.value.line, caught.value.column) == (2, 8)
