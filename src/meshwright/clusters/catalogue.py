"""Read the catalogue of real hardware (catalogue.toml), where every number has a source."""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

from meshwright.base.units import GIB, GIGA, MICRO, TERA
from meshwright.clusters.device import Device, Group, Link
from meshwright.errors import UnknownName, plain


@cache
def _text() -> str:
    return resources.files(__package__).joinpath("catalogue.toml").read_text("utf-8")


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(_text())


@cache
def catalogue_version() -> str:
    """Return a digest of the catalogue: plans say which one they were made with."""
    return hashlib.sha256(_text().encode()).hexdigest()[:12]


def device_names() -> list[str]:
    """Return every device of the catalogue, in its order.

    >>> "h100" in device_names()
    True
    """
    return list(_tables()["device"])


def device_aliases(name: str) -> tuple[str, ...]:
    return tuple(_tables()["device"][name]["aliases"])


def source(identifier: str) -> dict[str, str]:
    """Return the source of a number: title, publisher, sometimes an address."""
    found: dict[str, str] = _tables()["source"][identifier]
    return found


@cache
def _by_spelling() -> dict[str, str]:
    table = _tables()["device"]
    return {plain(spelling): name for name in table for spelling in (name, *table[name]["aliases"])}


def architectures() -> list[str]:
    """Return the chip generations of the catalogue."""
    return sorted({row["architecture"] for row in _tables()["device"].values() if row["architecture"]})


def find_device(name: str) -> str:
    """Return the catalogue's name for a device, from any spelling.

    >>> find_device("A100")
    'a100-80gb'
    """
    maker = re.compile(r"^(nvidia|amd|instinct|huawei|google)[ \-]+", re.IGNORECASE)
    spellings = _by_spelling()
    reported = {plain(text): key for text, key in reported_devices().items()}
    found = spellings.get(plain(name)) or spellings.get(plain(maker.sub("", name))) or reported.get(plain(name))
    if found is None:
        known = [s for n in device_names() for s in (n, *device_aliases(n))]
        raise UnknownName("device", name, known, see="a name listed by 'meshwright clusters', or a .toml file")
    return found


def reported_devices() -> dict[str, str]:
    """Return a map from names that drivers print to catalogue names."""
    table = _tables()["device"]
    return {reported: name for name in table for reported in table[name]["reported_as"]}


def reported_names(name: str) -> tuple[str, ...]:
    """Return the driver names of a catalogue device, the present one first; a user's own device has none.

    >>> reported_names("v100-32gb"), reported_names("mine")
    (('Tesla V100-SXM2-32GB',), ())
    """
    return tuple(_tables()["device"].get(name, {}).get("reported_as", ()))


def device(name: str) -> Device:
    """Return one device of the catalogue.

    >>> device("h100").flops["bf16"] / 1e12
    989.4
    """
    key = find_device(name)
    row = _tables()["device"][key]
    named = ("memory_gib", "memory_gb_s", "host_gb_s", "devices_per_node", "host_memory_gib")
    sources = {f: source(row[f][1])["title"] for f in named}
    sources |= {"watts": source(row["watts"][1])["title"]} if "watts" in row else {}
    sources |= {f"tflops.{p}": source(pair[1])["title"] for p, pair in row["tflops"].items()}
    return Device(
        key,
        row["title"],
        row["vendor"],
        memory=round(row["memory_gib"][0] * GIB),
        memory_bandwidth=row["memory_gb_s"][0] * GIGA,
        flops={p: pair[0] * TERA for p, pair in row["tflops"].items()},
        host_bandwidth=row["host_gb_s"][0] * GIGA,
        architecture=row["architecture"],
        watts=float(row.get("watts", [0.0])[0]),
        sources=sources,
    )


def server_size(name: str) -> int:
    """Return the number of devices in the usual server of this device."""
    return int(_tables()["device"][find_device(name)]["devices_per_node"][0])


def group(name: str, nodes: int, devices_per_node: int) -> Group:
    """Return nodes of a catalogue device, with its usual links fitted to the number of devices per node."""
    key = find_device(name)
    row = _tables()["device"][key]
    usual = server_size(key)
    links = tuple(_fit(_link(table, usual), usual, devices_per_node) for table in row["link"])
    return Group(nodes, devices_per_node, device(key), links, round(row["host_memory_gib"][0] * GIB))


def _link(table: dict[str, Any], usual: int) -> Link:
    return Link(
        table["kind"],
        table["topology"],
        bandwidth=table["bandwidth_gb_s"][0] * GIGA,
        aggregate=table["aggregate_gb_s"][0] * GIGA,
        latency=table["latency_us"][0] * MICRO,
        span=table.get("span", 0),
        inside_node=0 < table.get("span", 0) <= usual,
        pairs=parse_pairs(table.get("pairs", [])),
        sources={f: source(table[f][1])["title"] for f in ("bandwidth_gb_s", "aggregate_gb_s", "latency_us")},
    )


def parse_pairs(texts: list[str]) -> tuple[tuple[int, int, int], ...]:
    """Parse pairs: '0-3:2' means two bricks between devices 0 and 3."""
    pairs = []
    for text in texts:
        ends, bricks = text.split(":")
        low, high = sorted(int(end) for end in ends.split("-"))
        pairs.append((low, high, int(bricks)))
    return tuple(pairs)


def _fit(link: Link, usual: int, wanted: int) -> Link:
    """Fit a link to a server with another number of devices.

    Node-wide links and rails grow with it, shared adapters do not.
    """
    if link.topology == "rails":
        return replace(link, aggregate=link.bandwidth * wanted)
    if link.span == usual and link.topology != "cube-mesh" and usual != wanted:
        return replace(link, span=wanted, aggregate=link.aggregate * wanted / usual)
    return link
