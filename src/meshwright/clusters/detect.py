"""Detect the devices of this machine with the vendors' tools, or use the CPU. Never imports torch."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from meshwright.base.units import GIB, GIGA, MICRO, TERA
from meshwright.clusters import catalogue
from meshwright.clusters.cluster import Cluster
from meshwright.errors import InputError, plain

_TIMEOUT = 20  # seconds; a vendor tool that hangs must not hang us
# fp32 FLOPs per core and cycle: two fused multiply-add units of the widest vectors the core has.
_FLOPS_PER_CYCLE = (("avx512f", 64), ("avx2", 32), ("asimd", 16), ("sse2", 8))


@dataclass(frozen=True)
class Found:
    """One device as its driver reports it."""

    reported: str
    memory: int  # bytes


@dataclass(frozen=True)
class Detected:
    """This machine as a cluster of one node, the table to save, and notes on unknown values."""

    cluster: Cluster
    table: dict[str, Any]
    notes: tuple[str, ...]


def detect(limit: int = 0) -> Detected:
    """Detect this machine; `limit` is the most devices to use, or the number of CPU workers."""
    silent = []
    for tool, ask in (("nvidia-smi", _nvidia), ("rocm-smi", _amd), ("npu-smi", _ascend)):
        if path := shutil.which(tool):
            there = ask(path)
            found = _visible(there)
            if found:
                if limit > len(found):
                    problem = f"asked for {limit} devices, {tool} shows {len(found)}"
                    hidden = f"or CUDA_VISIBLE_DEVICES= (empty) for {limit} processes of the CPU"
                    raise InputError(problem, valid=f"local:1 to local:{len(found)}, {hidden}")
                return _accelerators(found[: limit or None], path)
            hidden = "CUDA_VISIBLE_DEVICES hides every device" if there else "is its driver in order?"
            silent.append(f"{tool} is installed but shows no device: {hidden}")
    return _cpu(limit, silent)


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _visible(found: list[Found]) -> list[Found]:
    """Return the devices in CUDA_VISIBLE_DEVICES; as in CUDA, the list ends at the first that does not exist."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return found
    visible = []
    for name in (part.strip() for part in chosen.split(",")):
        if name.startswith(("GPU-", "MIG-")):
            visible.append(found[0])  # equal devices: any of them will do
        elif re.fullmatch(r"[0-9]{1,4}", name) and int(name) < len(found):
            visible.append(found[int(name)])
        else:
            break
    return visible


def _nvidia(path: str) -> list[Found]:
    rows = _run(path, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits").splitlines()
    found = []
    for row in rows:
        name, _, mebibytes = row.rpartition(",")
        if name and mebibytes.strip().isdigit():
            found.append(Found(name.strip(), int(mebibytes) * 2**20))
    return found


def _amd(path: str) -> list[Found]:
    try:
        cards = json.loads(_run(path, "--showproductname", "--showmeminfo", "vram", "--json"))
    except ValueError:
        return []
    found = []
    for name in sorted((n for n in cards if n.startswith("card")), key=lambda n: int(n[4:] or 0)):
        facts = {key.lower(): value for key, value in cards[name].items()}
        memory = str(facts.get("vram total memory (b)", ""))
        if memory.isdigit():
            found.append(Found(str(facts.get("card series", "AMD accelerator")), int(memory)))
    return found


def _ascend(path: str) -> list[Found]:
    """Parse npu-smi's table: a row with the chip's name, then one with its memory as `used / total` MB."""
    found, name = [], ""
    for row in _run(path, "info").splitlines():
        cells = [cell.strip() for cell in row.strip("| ").split("|")]
        if head := re.match(r"\d+\s+(910\w*|Ascend\w*)", cells[0]):
            name = head[1]
        elif name and (memory := re.findall(r"\d+\s*/\s*(\d+)", cells[-1])):
            found.append(Found(name, int(memory[-1]) * 2**20))
            name = ""
    return found


def _known(reported: str) -> str:
    """Return the catalogue's device for a driver's name, or ""."""
    by_plain = {plain(name): key for name, key in catalogue.reported_devices().items()}
    return by_plain.get(plain(reported), "")


def _accelerators(found: list[Found], tool: str) -> Detected:
    groups, notes = [], []
    for facts, members in groupby(found):
        size = len(list(members))
        row: dict[str, Any] = {"device": _known(facts.reported), "nodes": 1, "devices_per_node": size}
        row["memory_gib"] = [round(facts.memory / GIB, 3), "driver"]
        if not row["device"]:
            known = ", ".join(catalogue.device_names()[:6])
            problem = f"'{facts.reported}' ({facts.memory / GIB:.0f} GiB) is not in the catalogue ({known}, ...)"
            raise InputError(problem, valid="a .toml file that describes it: see docs/cluster.md")
        groups.append(row)
    if "nvidia-smi" in tool and len(found) > 1 and _nvlink_missing(tool):
        notes.append("nvidia-smi topo shows no NVLink: only the slower links are used")
        for row in groups:
            row["link"] = _without_nvlink(row["device"], row["devices_per_node"])
    notes.append(
        "the links are those of the usual server of this device; the network between nodes is not seen from here"
    )
    table = {"name": platform.node() or "this machine", "group": groups}
    return Detected(Cluster.from_table(table), table, tuple(notes))


def _nvlink_missing(tool: str) -> bool:
    matrix = _run(tool, "topo", "-m")
    return bool(matrix) and not re.search(r"\bNV\d+\b", matrix)


def _without_nvlink(device: str, size: int) -> list[dict[str, Any]]:
    """Return the catalogue's links without NVLink; PCIe joins the node if nothing else does."""
    links = [link for link in catalogue.group(device, 1, size).links if link.kind != "nvlink"]
    rows: list[dict[str, Any]] = []
    if size > 1 and not any(link.span >= size for link in links):
        host = catalogue.device(device).host_bandwidth / GIGA
        rows.append({"kind": "pcie", "topology": "pcie-tree", "span": size, "bandwidth_gb_s": host, "latency_us": 10.0})
    for link in links:
        row: dict[str, Any] = {"kind": link.kind, "topology": link.topology, "bandwidth_gb_s": link.bandwidth / GIGA}
        row |= {"aggregate_gb_s": link.aggregate / GIGA, "latency_us": link.latency / MICRO}
        if not link.span or size > 1:
            rows.append(row | ({"span": link.span} if link.span else {}))
    return rows


def _cpu(workers: int, notes: list[str]) -> Detected:
    """Return worker processes that share the cores and memory of this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = workers or cores
    memory = _memory_limit()
    share = memory / workers / GIB
    peak = cores * _core_flops() / workers / TERA
    row = {
        "device": "cpu",
        "title": f"CPU worker, {cores / workers:.3g} of {cores} cores",
        "nodes": 1,
        "devices_per_node": workers,
        "memory_gib": [round(share, 3), "machine memory / workers"],
        "tflops": {"fp32": [round(peak, 5), "cores x clock x vector width; an upper bound"]},
        "host_memory_gib": [round(memory / GIB, 3), "machine memory"],
    }
    table = {"name": platform.node() or "this machine", "group": [row]}
    note = "no accelerator found; compute and link speeds of CPU workers are estimates until measured"
    return Detected(Cluster.from_table(table), table, (*notes, note))


def _memory_limit(read: Callable[[str], str] | None = None) -> int:
    """Return the bytes this process may use: the machine's memory, or its control group's limit if lower."""
    read = read or (lambda path: Path(path).read_text("utf-8") if Path(path).is_file() else "")
    total = re.search(r"MemTotal:\s+(\d+) kB", read("/proc/meminfo"))
    limits = [int(total[1]) * 1024] if total else [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    groups = [
        read(path).strip() for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    ]
    return min([*limits, *(int(text) for text in groups if text.isdigit())])


def _core_flops() -> float:
    """Return fp32 FLOP/s of one core from its clock and vector extensions; 3 GHz if the clock is unknown."""
    path = Path("/proc/cpuinfo")
    info = path.read_text("utf-8", "replace") if path.is_file() else ""
    clocks = [float(mhz) for mhz in re.findall(r"cpu MHz\s*:\s*([\d.]+)", info)]
    flags = set(" ".join(re.findall(r"(?:flags|Features)\s*:\s*(.*)", info)[:1]).split())
    per_cycle = next((flops for flag, flops in _FLOPS_PER_CYCLE if flag in flags), 8)
    return per_cycle * (max(clocks, default=3000.0)) * 1e6  # MHz
