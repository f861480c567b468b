"""Detection, driven by stand-ins that print what the vendors' tools print."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from meshwright.clusters import Cluster
from meshwright.clusters.detect import _memory_limit, detect
from meshwright.errors import InputError

H100_TOPOLOGY = "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n"
PCIE_TOPOLOGY = "\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X \n"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Put a vendor tool on an otherwise empty PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return install


def nvidia(rows: list[str], topology: str) -> str:
    listing = "\n".join(rows)
    return f"if [ \"$1\" = topo ]; then printf '%s' '{topology}'; else printf '%s\\n' '{listing}'; fi"


def test_nvidia(tool) -> None:  # type: ignore[no-untyped-def]
    tool("nvidia-smi", nvidia(["NVIDIA H100 80GB HBM3, 81559"] * 8, H100_TOPOLOGY))
    cluster = detect().cluster
    assert (cluster.devices, cluster.device(0).name) == (8, "h100")
    assert cluster.device(0).memory == pytest.approx(81559 * 2**20, rel=1e-4)
    assert cluster.link(0, 7).kind == "nvlink"
    assert Cluster.load("local:3").devices == 3


def test_nvidia_without_nvlink(tool) -> None:  # type: ignore[no-untyped-def]
    tool("nvidia-smi", nvidia(["NVIDIA H100 80GB HBM3, 81559"] * 2, PCIE_TOPOLOGY))
    found = detect()
    assert found.cluster.link(0, 1).kind == "pcie"
    assert any("no NVLink" in note for note in found.notes)


def test_mixed_devices_become_groups(tool) -> None:  # type: ignore[no-untyped-def]
    tool("nvidia-smi", nvidia(["NVIDIA H100 80GB HBM3, 81559", "NVIDIA L4, 23034"], H100_TOPOLOGY))
    assert [group.device.name for group in detect().cluster.groups] == ["h100", "l4"]


def test_amd(tool) -> None:  # type: ignore[no-untyped-def]
    card = '{"Card Series": "AMD Instinct MI300X", "VRAM Total Memory (B)": "206141652992"}'
    tool("rocm-smi", f"printf '%s' '{{\"card0\": {card}, \"card1\": {card}}}'")
    assert detect().cluster.device(1).name == "mi300x"


def test_ascend(tool) -> None:  # type: ignore[no-untyped-def]
    table = (
        "| NPU   Name  | Health | Power(W) Temp(C) |\n"
        "| 0     910B3 | OK     | 90.1     44      |\n"
        "| 0           | 0000:C1:00.0 | 0  0 / 0  3145 / 65536 |\n"
    )
    tool("npu-smi", f"printf '%s' '{table}'")
    assert detect().cluster.device(0).name == "ascend-910b"


def test_an_unknown_accelerator_is_named(tool) -> None:  # type: ignore[no-untyped-def]
    tool("nvidia-smi", nvidia(["NVIDIA Quux 9000, 10240"], ""))
    with pytest.raises(InputError, match="NVIDIA Quux 9000"):
        detect()


def test_more_devices_than_there_are(tool) -> None:  # type: ignore[no-untyped-def]
    tool("nvidia-smi", nvidia(["NVIDIA L4, 23034"], ""))
    with pytest.raises(InputError, match="asked for 4 devices"):
        detect(4)


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'", "printf 'garbage,\\n,,'"])
def test_a_broken_tool_falls_back_to_the_cpu(tool, script: str) -> None:  # type: ignore[no-untyped-def]
    tool("nvidia-smi", script)
    assert detect().cluster.device(0).name == "cpu"


def test_cpu_workers_share_the_memory(tool) -> None:  # type: ignore[no-untyped-def]
    two, four = detect(2).cluster, detect(4).cluster
    assert two.device(0).memory == pytest.approx(2 * four.device(0).memory, rel=1e-3)
    assert two.device(0).flops["fp32"] == pytest.approx(2 * four.device(0).flops["fp32"], rel=1e-2)


def test_a_control_group_lowers_the_memory() -> None:
    files = {"/proc/meminfo": "MemTotal:  8388608 kB\n", "/sys/fs/cgroup/memory.max": "1073741824\n"}
    assert _memory_limit(lambda path: files.get(path, "")) == 2**30
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert _memory_limit(lambda path: files.get(path, "")) == 8 * 2**30


def test_visible_devices(tool, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    tool("nvidia-smi", nvidia(["NVIDIA H100 80GB HBM3, 81559", "NVIDIA L4, 23034", "NVIDIA L4, 23034"], H100_TOPOLOGY))
    for visible, devices in (
        ("1,2", ["l4", "l4"]),
        ("0,-1,1", ["h100"]),
        ("2,9,0", ["l4"]),
        ("-1", ["cpu"]),
        ("", ["cpu"]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = detect()
        assert [found.cluster.device(r).name for r in range(len(devices))] == devices, visible
        if devices != ["cpu"]:
            assert found.cluster.devices == len(devices)
        else:
            assert any("CUDA_VISIBLE_DEVICES" in note for note in found.notes)


def test_a_broken_driver_is_said(tool) -> None:  # type: ignore[no-untyped-def]
    tool("nvidia-smi", "exit 18")
    assert any("nvidia-smi is installed but shows no device" in note for note in detect().notes)


def test_memory_that_is_not_known(tool) -> None:  # type: ignore[no-untyped-def]
    card = '{"Card Series": "AMD Instinct MI300X", "VRAM Total Memory (B)": "N/A"}'
    tool("rocm-smi", f"printf '%s' '{{\"card0\": {card}}}'")
    assert detect().cluster.device(0).name == "cpu"


def test_mixed_devices_without_nvlink(tool) -> None:  # type: ignore[no-untyped-def]
    rows = ["NVIDIA A100-SXM4-80GB, 81920"] * 2 + ["NVIDIA H100 80GB HBM3, 81559"]
    tool("nvidia-smi", nvidia(rows, PCIE_TOPOLOGY))
    assert [g.devices for g in detect().cluster.groups] == [2, 1]
