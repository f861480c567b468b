"""The catalogue: everything promised is there, every number has a source, and known facts hold."""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest

from meshwright.clusters import Cluster, device, device_aliases, device_names, source
from meshwright.errors import plain

TABLE = tomllib.loads(resources.files("meshwright.clusters").joinpath("catalogue.toml").read_text("utf-8"))


def numbers(table: object, path: str = "") -> list[tuple[str, object]]:
    """Every leaf that is a number or a [number, source] pair."""
    if isinstance(table, dict):
        return [leaf for key, value in table.items() for leaf in numbers(value, f"{path}.{key}")]
    if isinstance(table, list) and table and isinstance(table[0], dict):
        return [leaf for i, value in enumerate(table) for leaf in numbers(value, f"{path}[{i}]")]
    if isinstance(table, int | float) or (isinstance(table, list) and table and isinstance(table[0], int | float)):
        return [(path, table)]
    return []


def test_every_number_has_a_source_that_exists() -> None:
    leaves = [(path, leaf) for path, leaf in numbers(TABLE["device"]) if not path.endswith(".span")]
    assert len(leaves) > 500
    for path, leaf in leaves:
        assert isinstance(leaf, list), f"{path} has no source"
        assert len(leaf) == 2, path
        assert leaf[1] in TABLE["source"], path
        assert leaf[0] > 0, path


def test_every_source_is_used_and_says_what_it_is() -> None:
    used = {leaf[1] for _, leaf in numbers(TABLE["device"]) if isinstance(leaf, list)}
    assert used == set(TABLE["source"])
    assert all(len(source(name)["title"]) > 10 for name in used)


def test_everything_promised_is_there() -> None:
    promised = (
        "v100-16gb v100-32gb a100-40gb a100-80gb a100-40gb-pcie a100-80gb-pcie a800 h100 h100-pcie h100-nvl h100-500w "
        "h800 h20 h200 b200 gb200 b300 mi250 mi300x mi325x mi355x a6000 rtx4090 t4 l4 a10g titan-xp ascend-910a "
        "ascend-910b hygon-dcu biren-br100 tpu-v4 tpu-v5p cpu"
    )
    assert set(promised.split()) <= set(device_names())


def test_names_and_aliases_are_unique() -> None:
    meant: dict[str, str] = {}
    for name in device_names():
        for spelling in (name, *device_aliases(name)):
            assert meant.setdefault(plain(spelling), name) == name, spelling


# Dense peaks and memory as the vendors' datasheets print them, typed here a second time.
@pytest.mark.parametrize(
    ("name", "precision", "tflops", "gb_s"),
    [
        ("v100-32gb", "fp16", 125, 900), ("a100-80gb", "bf16", 312, 2039), ("a100-40gb", "bf16", 312, 1555),
        ("h100", "bf16", 989.4, 3352), ("h100", "fp8", 1978.9, 3352), ("h200", "bf16", 989.4, 4800),
        ("h20", "bf16", 148, 4000), ("b200", "bf16", 2250, 8000), ("gb200", "fp4", 10000, 8000),
        ("mi300x", "bf16", 1307.4, 5300), ("mi325x", "bf16", 1307.4, 6000), ("rtx4090", "bf16", 165.2, 1008),
        ("t4", "fp16", 65, 320), ("titan-xp", "fp32", 12.15, 547.7), ("tpu-v4", "bf16", 275, 1228),
        ("tpu-v5p", "bf16", 459, 2765), ("ascend-910a", "fp16", 256, 1200),
    ],
)  # fmt: skip
def test_datasheet_figures(name: str, precision: str, tflops: float, gb_s: float) -> None:
    assert device(name).flops[precision] / 1e12 == pytest.approx(tflops, rel=0.01)
    assert device(name).memory_bandwidth / 1e9 == pytest.approx(gb_s, rel=0.03)


@pytest.mark.parametrize("name", ["v100-32gb", "t4", "titan-xp", "ascend-910a"])
def test_devices_without_bfloat16(name: str) -> None:
    assert "bf16" not in device(name).flops


def test_dgx1_has_six_bricks_per_device_and_uneven_pairs() -> None:
    cluster = Cluster.preset("1x8xv100-32gb")
    mesh = cluster.groups[0].links[0]
    for i in range(8):
        assert sum(mesh.bricks(i, j) for j in range(8) if j != i) == 6
    assert cluster.link(0, 3).bandwidth == 2 * cluster.link(0, 1).bandwidth == 50e9
    assert cluster.link(0, 5).kind == "pcie"


@pytest.mark.parametrize(
    ("text", "a", "b", "kind"),
    [
        ("18x4xgb200", 0, 71, "nvlink"),  # one NVL72 domain over 18 trays
        ("19x4xgb200", 71, 72, "infiniband"),
        ("2x8xh100", 7, 8, "infiniband"),
        ("1x8xmi250", 0, 1, "package"),  # two dies of one package
        ("1x8xmi250", 1, 2, "xgmi"),
        ("1x8xh100-nvl", 0, 1, "nvlink"),  # bridges join pairs
        ("1x8xh100-nvl", 1, 2, "pcie"),
        ("1x8xrtx4090", 0, 1, "pcie"),
        ("2x4xtitan-xp", 3, 4, "ethernet"),
        ("1x16xh100", 0, 15, "nvlink"),  # a bigger node has a bigger switch
    ],
)
def test_which_link_joins_two_devices(text: str, a: int, b: int, kind: str) -> None:
    cluster = Cluster.preset(text)
    assert cluster.link(a, b).kind == cluster.link(b, a).kind == kind


def test_rails_grow_with_the_node_and_shared_adapters_do_not() -> None:
    assert Cluster.preset("2x4xh100").groups[0].network.aggregate == 4 * 50e9
    assert (
        Cluster.preset("2x8xtitan-xp").groups[0].network.aggregate
        == Cluster.preset("2x4xtitan-xp").groups[0].network.aggregate
    )


@pytest.mark.parametrize("name", device_names())
@pytest.mark.parametrize("each", [1, 2, 3, 4, 8, 16])
def test_links_inside_a_node_stay_inside(name: str, each: int) -> None:
    """Whatever the size of the node: devices of two nodes meet on the network, or on a domain wider than a node."""
    cluster = Cluster.preset(f"2x{each}x{name}")
    usual = Cluster.preset(f"2x{each}x{name}").groups[0]
    wide = {link.kind for link in usual.links if link.span and not link.inside_node}
    for a in range(each):
        for b in range(each, 2 * each):
            assert cluster.link(a, b).kind in {usual.network.kind, *wide}, (a, b)
    assert wide <= ({"nvlink"} if name in {"gb200", "gb300"} else {"ici"})
