"""All measurements of a machine in order, and the table of them in a cluster file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright.base.units import GIB, GIGA, MICRO, TERA
from meshwright.clusters.device import Link
from meshwright.clusters.measurements import MeasuredLink
from meshwright.measurement import fitting, layers, links, samples
from meshwright.measurement.layers import host_seconds, reserved_beside_tensors, shard_seconds
from meshwright.measurement.samples import ACCELERATOR, PROCESSOR, Sample

_NOISY = 0.35  # spread above which a sample is noise
_NOISY_LINKS = 1.0  # the same for several processes, which wait to be woken
_SOME = 0.15  # share of a measurement's samples that may be noisy: curves are fitted to all of them
_FEW = 4  # minimum samples for a curve of four parameters
_MESSAGES = {"cuda": tuple(2**n for n in (12, 16, 20, 24, 27)), "cpu": tuple(2**n for n in (12, 15, 18, 21, 23))}
Found = Mapping[str, Sequence[Sample]]


@dataclass(frozen=True)
class Measurement:
    """One kind of measurement, and the function that runs it."""

    name: str
    run: Callable[[], Iterator[Sample]]


def measurements(device: str, tiers: Sequence[links.Tier]) -> list[Measurement]:
    """Return the measurements of a device and of the links between the devices of a run."""
    scale = ACCELERATOR if device.startswith("cuda") else PROCESSOR
    kinds = samples.precisions(device)
    found = [
        Measurement(f"products, {kind}", lambda kind=kind: samples.products(device, scale, kind))  # type: ignore[misc]
        for kind in kinds
    ]
    found += [
        Measurement("attention", lambda: samples.attention(device, scale, kinds[0])),
        Measurement("memory", lambda: samples.passes(device, scale)),
        Measurement("optimizer", lambda: samples.update(device, scale)),
        Measurement("copies", lambda: samples.copies(device, scale)),
        Measurement("launches", lambda: _launches(device)),
        Measurement("blocks", lambda: layers.blocks(scale, device)),
    ]
    messages = _MESSAGES[device.partition(":")[0]]
    found += [
        Measurement(
            f"links {tier.name}, {len(tier.groups[0])} devices",
            lambda tier=tier: links.collectives(tier, device, messages),  # type: ignore[misc]
        )
        for tier in tiers
    ]
    if tiers:
        found.append(Measurement("overlap", lambda: _overlap(device, kinds[0])))
    elif device.startswith("cuda"):
        found.append(Measurement("overlap", lambda: samples.copies_under_products(device, scale)))
    return found


def _launches(device: str) -> Iterator[Sample]:
    yield from samples.kernels(device)
    yield Sample("host", {"kernels": 1}, host_seconds(device))


def slower(measured: dict[str, Any], times: float) -> dict[str, Any]:
    """Return a `measured` table whose kernels take `times` as long.

    >>> slower({"memory_gb_s": 30.0, "update_gb_s": 20.0, "product": {"fp32": {"tflops": 0.2, "half": 9.0}}}, 1.25)
    {'memory_gb_s': 24.0, 'update_gb_s': 20.0, 'product': {'fp32': {'tflops': 0.16, 'half': 9.0}}}
    """

    def scaled(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: scaled(key, one) for key, one in value.items()}
        if name == "tflops":
            return [_round(one / times) for one in value] if isinstance(value, list) else _round(value / times)
        return _round(value / times) if name in {"memory_gb_s", "cached_gb_s", "norm_gb_s"} else value

    return {name: scaled(name, value) for name, value in measured.items()}


def _overlap(device: str, kind: str) -> Iterator[Sample]:
    width = 4096 if device.startswith("cuda") else 512
    a = torch.randn(width, width, device=device, dtype=samples.TYPES[kind])

    def work() -> None:
        for _ in range(20):
            a @ a

    work()
    yield Sample("overlap", {}, links.slowdown(device, work))
    yield Sample("shard", {}, shard_seconds(device))


def noise(name: str, found: Sequence[Sample]) -> str:
    """Return a warning if too many samples of a measurement are noise, else an empty string."""
    most = _NOISY_LINKS if name.startswith("links") else _NOISY
    noisy = sorted((one for one in found if one.timing.spread > most), key=lambda one: -one.timing.spread)
    if len(noisy) <= _SOME * len(found) or name == "overlap":
        return ""
    worst = noisy[0]
    return (
        f"{len(noisy)} of {len(found)} timings spread by more than {most:.0%} of their median, most of all "
        f"'{worst.name}' ({worst.timing.spread:.0%})"
    )


def device_table(found: Found, device: str, how: str) -> dict[str, Any]:
    """Return the `measured` table of a device in a cluster file; the catalogue's curves cover what was not timed."""
    by_kind: dict[str, list[Sample]] = {}
    for sample in (sample for some in found.values() for sample in some):
        by_kind.setdefault(sample.kind, []).append(sample)
    table: dict[str, Any] = {"how": how, "issues_alone": not device.startswith("cuda")}
    passing = by_kind.get("addition", []) + by_kind.get("activation", [])
    if len(passing) >= _FEW:
        memory, cache = _memory(passing, device)
        table |= {"memory_gb_s": _round(memory / GIGA), **cache, "kernel_us": _round(_kernel(by_kind) / MICRO)}
        table |= _curves(by_kind, memory, samples.precisions(device))
    if "norm" in by_kind:
        table["norm_gb_s"] = _round(fitting.rate_of_passes(by_kind["norm"]) / GIGA)

    def rate(kind: str) -> float:
        return _round(min(one.facts["bytes"] / one.timing.seconds for one in by_kind[kind]) / GIGA)

    if "update" in by_kind:
        table["update_gb_s"] = rate("update")
    if "host update" in by_kind:
        table["host_update_gb_s"] = rate("host update")
    if "copy to host" in by_kind:
        table["host_gb_s"] = min(rate("copy to device"), rate("copy to host"))
    for name, kind, unit in (
        ("launch_us", "host", MICRO),
        ("contention", "overlap", 1.0),
        ("shard_us", "shard", MICRO),
    ):
        if kind in by_kind:
            table[name] = _round(by_kind[kind][0].timing.seconds / unit)
    if device.startswith("cuda"):
        table["fragmentation"] = _round(reserved_beside_tensors(device))
        table["context_gib"] = _round(samples.memory_beside_tensors() / GIB)
    return table


def _memory(passing: Sequence[Sample], device: str) -> tuple[float, dict[str, Any]]:
    """Return bytes/s of memory, and the table of caches: a CPU's caches hold whole activations."""
    if device != "cpu":
        return fitting.rate_of_passes(passing), {}
    cached, memory, held = fitting.cached_passes(passing)
    return memory, {"cached_gb_s": _round(cached / GIGA), "cache_mib": _round(held / 2**20)}


def _curves(by_kind: Mapping[str, Sequence[Sample]], memory: float, kinds: Sequence[str]) -> dict[str, Any]:
    """Return curves of matmuls and of attention, each where enough samples exist to fit one."""
    sizes = {"fp32": 4.0, "fp8": 1.0}
    seen = {kind: by_kind.get(f"product {kind}", ()) for kind in kinds}
    products = {kind: fitting.products(s, memory, sizes.get(kind, 2.0)) for kind, s in seen.items() if len(s) >= _FEW}
    table: dict[str, Any] = {}
    if products:
        table["product"] = {
            kind: {
                "tflops": _round(p.rate / TERA), "half_k": _round(p.half_k), "half": _round(p.half),
                "floor_us": _round(p.floor / MICRO),
            }
            for kind, p in products.items()
        }  # fmt: skip
    first = kinds[0]
    passes = [by_kind.get(f"attention {way} {first}", ()) for way in ("forward", "backward")]
    if first in products and min(map(len, passes)) >= _FEW:
        found = fitting.attention(passes[0][: len(passes[1])], passes[1], products[first].floor)
        table["attention"] = {
            first: {
                "tflops": [_round(rate / TERA) for rate in found.rate],
                "half_keys": list(map(_round, found.half_keys)),
                "half_rows": list(map(_round, found.half_rows)),
                "head_power": _round(found.head_power),
            }
        }
    return table


def _kernel(by_kind: Mapping[str, Sequence[Sample]]) -> float:
    """Return seconds of the smallest kernel: from a CUDA graph, where there are samples of one."""
    if "kernel" in by_kind:
        return by_kind["kernel"][0].timing.seconds / by_kind["kernel"][0].facts["kernels"]
    return min(sample.timing.seconds for sample in by_kind["addition"])


def link_tables(ours: Sequence[Link], found: Found) -> list[dict[str, Any]]:
    """Return the links of a node group as a cluster file writes them, with their measured rates."""
    tables = []
    for link in (link for link in ours if link.span != 1):
        table: dict[str, Any] = {
            "kind": link.kind, "topology": link.topology, "bandwidth_gb_s": _round(link.bandwidth / GIGA),
            "aggregate_gb_s": _round(link.aggregate / GIGA), "latency_us": _round(link.latency / MICRO),
        }  # fmt: skip
        if link.span:
            table["span"] = link.span
        where = "links inside nodes" if link.inside_node else "links between nodes"
        seen = [sample for name, some in found.items() if name.startswith(where) for sample in some]
        if len({sample.kind for sample in seen}) == len(links.KINDS):  # else some rates were never timed
            table["measured"] = _link_table(links.link(seen))
        tables.append(table)
    return tables


def _link_table(seen: MeasuredLink) -> dict[str, float]:
    rates = {"reduce": seen.reduce, "gather": seen.gather, "exchange": seen.exchange, "send": seen.send}
    table = {f"{name}_gb_s": _round(rate / GIGA) for name, rate in rates.items()}
    return table | {"step_us": _round(seen.step / MICRO), "start_us": _round(seen.start / MICRO)}


def _round(value: float) -> float:
    """Round to four digits: nothing here is known better.

    >>> _round(123456.0), _round(0.00012346)
    (123500.0, 0.0001235)
    """
    return float(f"{value:.4g}") if value > 1e-6 else 0.0
