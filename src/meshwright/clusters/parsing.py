"""Parse clusters as people write them: `2x8xa100-80gb+4x8xv100-32gb`, or a TOML file for the rest."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from meshwright.base.tables import Table, convert
from meshwright.base.units import GIB, GIGA, MICRO, TERA
from meshwright.clusters import catalogue
from meshwright.clusters.device import Device, Group, Link, LinkKind, Topology
from meshwright.clusters.measurements import Measured, MeasuredLinkTable, MeasuredTable, measured, measured_link
from meshwright.errors import InputError, UnknownName, shorten

MOST_DEVICES = 1_000_000
_PRECISIONS = {"fp32", "tf32", "fp16", "bf16", "fp8", "fp4"}

Positive = Annotated[float, Meta(gt=0, le=1e9)]
# Every number may name its source, as in the catalogue: 80 or [80, "datasheet"].
Sourced = list[float | str]
Number = Positive | Sourced
Count = Annotated[int, Meta(ge=1, le=MOST_DEVICES)]


class LinkTable(Table, frozen=True, kw_only=True):
    kind: LinkKind
    topology: Topology
    bandwidth_gb_s: Number
    latency_us: Number
    aggregate_gb_s: Number | UnsetType = UNSET
    span: Annotated[int, Meta(ge=2, le=MOST_DEVICES)] | UnsetType = UNSET
    pairs: list[Annotated[str, Meta(pattern=r"^[0-9]{1,5}-[0-9]{1,5}:[0-9]{1,3}$")]] = []
    measured: MeasuredLinkTable | None = None


class GroupTable(Table, frozen=True, kw_only=True):
    device: str
    nodes: Count = 1
    devices_per_node: Count | UnsetType = UNSET
    title: str = ""
    vendor: str = "generic"
    architecture: str = ""
    watts: Number | UnsetType = UNSET
    memory_gib: Number | UnsetType = UNSET
    memory_gb_s: Number | UnsetType = UNSET
    tflops: dict[str, Number] = {}
    host_gb_s: Number | UnsetType = UNSET
    host_memory_gib: Number | UnsetType = UNSET
    link: list[LinkTable] = []
    measured: MeasuredTable | None = None


VERSION = 1  # of cluster files: grows when a field changes its meaning; a file without one is of version 1


class ClusterTable(Table, frozen=True, kw_only=True):
    version: Annotated[int, Meta(ge=1)] = VERSION
    group: Annotated[list[GroupTable], Meta(min_length=1)]
    name: str = ""
    between: LinkTable | None = None


def parse_groups(text: str) -> tuple[Group, ...]:
    """Parse `NODESxDEVICESxKIND`, several joined by `+`.

    `16xh100` means 16 devices in their usual servers, `h100` one device.
    """
    return tuple(_parse_group(part.strip(), text) for part in text.split("+"))


def _parse_group(part: str, whole: str) -> Group:
    pattern = r"(?:(\d{1,9})\s*x\s*)?(?:(\d{1,9})\s*x\s*)?([a-z0-9][\w.\- ]*)"
    match = re.fullmatch(pattern, part, re.ASCII | re.IGNORECASE)
    if not match:
        problem = f"'{shorten(whole)}' is not a cluster"
        raise InputError(problem, valid="NODESxDEVICESxKIND such as 8x8xh100, joined by +, or a .toml file")
    first, second, kind = match.groups()
    if re.fullmatch(r"[0-9]+x", kind):
        raise InputError(f"'{shorten(whole)}' names no device", valid="NODESxDEVICESxKIND such as 8x8xh100")
    nodes, devices = (int(first), int(second)) if second else (1, int(first or 1))
    if not 1 <= nodes * devices <= MOST_DEVICES:
        raise InputError(f"'{part}' has {nodes * devices:,} devices", valid=f"1 to {MOST_DEVICES:,}")
    if not second:
        nodes, devices = _in_servers(part, devices, kind)
    return catalogue.group(kind, nodes, devices)


def _in_servers(part: str, devices: int, kind: str) -> tuple[int, int]:
    """Return (nodes, devices per node): one node while the devices fit into one, else full servers."""
    usual = catalogue.server_size(kind)
    if devices <= usual:
        return 1, devices
    if devices % usual:
        problem = f"'{part}' does not fill servers of {usual}"
        raise InputError(problem, valid=f"a multiple of {usual}, or NODESxDEVICESxKIND")
    return devices // usual, usual


def groups_of(table: object, file: str) -> tuple[str, tuple[Group, ...], Link | None]:
    """Convert a cluster table (from TOML or a plan) to name, groups, and the link between groups."""
    parsed = convert(table, ClusterTable, file=file)
    if parsed.version > VERSION:
        problem = f"is {parsed.version}, written by a newer meshwright; this one reads up to {VERSION}"
        raise InputError(problem, file=file, field="version", valid=f"1 to {VERSION}")
    groups = []
    for i, row in enumerate(parsed.group):
        try:
            groups.append(_group(row, file, f"group[{i}]"))
        except InputError as error:
            if not error.field.startswith("group["):
                error.field = f"group[{i}].{error.field}".rstrip(".")
            raise error.at(file=file) from None
    total = sum(g.devices for g in groups)
    if total > MOST_DEVICES:
        raise InputError(f"the cluster has {total:,} devices", file=file, field="group", valid=f"1 to {MOST_DEVICES:,}")
    between = _link(parsed.between, 1, file, "between") if parsed.between else None
    return parsed.name, tuple(groups), between


def _group(row: GroupTable, file: str, field: str) -> Group:
    """Return a group: catalogue values of a known device, overridden by the table."""
    _own_sources(row)
    try:
        name = catalogue.find_device(row.device)
    except UnknownName as unknown:
        return _own_group(row, file, field, unknown)
    size = catalogue.server_size(name) if row.devices_per_node is UNSET else row.devices_per_node
    base = catalogue.group(name, row.nodes, size)
    links = _links(row, base.devices_per_node, file, field) or base.links
    return Group(row.nodes, size, _device(row, base.device), links, _scaled(row.host_memory_gib, GIB, base.host_memory))


def _own_group(row: GroupTable, file: str, field: str, unknown: UnknownName) -> Group:
    """Return a group of the user's own device: the table must hold every value the catalogue would."""
    needed = {"memory_gib": row.memory_gib, "memory_gb_s": row.memory_gb_s, "tflops": row.tflops or UNSET}
    missing = [name for name, value in needed.items() if value is UNSET]
    missing += [] if row.link else ["link"]
    if missing:
        hint = f"{unknown.problem}; a device of your own needs {', '.join(missing)} too"
        raise InputError(hint, file=file, field=f"{field}.device", valid=unknown.valid)
    size = 1 if row.devices_per_node is UNSET else row.devices_per_node
    memory = _scaled(row.memory_gib, GIB, 0)
    blank = Device(row.device, row.title or row.device, row.vendor, memory, 0.0, {}, 0.0)
    links = _links(row, size, file, field)
    return Group(row.nodes, size, _device(row, blank), links, _scaled(row.host_memory_gib, GIB, 0))


def _device(row: GroupTable, base: Device) -> Device:
    for name in row.tflops:
        if name not in _PRECISIONS:
            raise UnknownName("precision in tflops", name, _PRECISIONS, see=", ".join(sorted(_PRECISIONS)))
    if row.architecture and row.architecture not in catalogue.architectures():
        names = catalogue.architectures()
        raise UnknownName("architecture", row.architecture, names, see=", ".join(names)).at(field="architecture")
    flops = base.flops | {p: _value(v) * TERA for p, v in row.tflops.items()}
    return replace(
        base,
        title=row.title or base.title,
        architecture=row.architecture or base.architecture,
        watts=float(_scaled(row.watts, 1.0, base.watts)),
        memory=_scaled(row.memory_gib, GIB, base.memory),
        memory_bandwidth=float(_scaled(row.memory_gb_s, GIGA, base.memory_bandwidth)),
        flops=flops,
        host_bandwidth=float(_scaled(row.host_gb_s, GIGA, base.host_bandwidth)),
        sources=base.sources | _own_sources(row),
        measured=_measured(row.measured) if row.measured else base.measured,
    )


def _measured(table: MeasuredTable) -> Measured:
    for field, names in (("product", table.product), ("attention", table.attention)):
        for name in names:
            if name not in _PRECISIONS:
                valid = ", ".join(sorted(_PRECISIONS))
                raise UnknownName("precision", name, _PRECISIONS, see=valid).at(field=f"measured.{field}")
    return measured(table)


def _own_sources(row: GroupTable) -> dict[str, str]:
    named = {
        name: getattr(row, name) for name in ("memory_gib", "memory_gb_s", "host_gb_s", "host_memory_gib", "watts")
    }
    named |= {f"tflops.{p}": v for p, v in row.tflops.items()}
    given = {name: value for name, value in named.items() if value is not UNSET}
    for name, value in given.items():
        try:
            _value(value)
        except InputError as error:
            raise error.at(field=name) from None
    return {name: str(value[1]) if isinstance(value, list) else "cluster file" for name, value in given.items()}


def _links(row: GroupTable, devices_per_node: int, file: str, field: str) -> tuple[Link, ...]:
    links = tuple(_link(t, devices_per_node, file, f"{field}.link[{i}]") for i, t in enumerate(row.link))
    if not links:
        return ()
    spans = [link.span for link in links]
    if spans[-1]:
        problem = "the last link must join everything: leave its span out"
        raise InputError(problem, file=file, field=f"{field}.link[{len(links) - 1}].span")
    if any(span == 0 for span in spans[:-1]):
        where = f"{field}.link[{spans.index(0)}]"
        raise InputError("only the last link may leave span out", file=file, field=f"{where}.span", valid="2 or more")
    if sorted(spans[:-1]) != spans[:-1]:
        raise InputError("links must run from inner to outer: spans may not shrink", file=file, field=f"{field}.link")
    return links


def _link(table: LinkTable, devices_per_node: int, file: str, field: str) -> Link:
    if bool(table.pairs) != (table.topology == "cube-mesh"):
        raise InputError("pairs go with the topology cube-mesh, and only with it", file=file, field=f"{field}.pairs")
    bandwidth = _value(table.bandwidth_gb_s) * GIGA
    inside = devices_per_node if table.span is UNSET else min(table.span, devices_per_node)
    shared = table.topology == "shared"
    aggregate = _scaled(table.aggregate_gb_s, GIGA, bandwidth if shared else bandwidth * inside)
    pairs = catalogue.parse_pairs(table.pairs)
    span = 0 if table.span is UNSET else table.span
    if any(high >= span for _, high, _ in pairs):
        raise InputError(f"names a device outside the span of {span}", file=file, field=f"{field}.pairs")
    return Link(
        table.kind, table.topology, bandwidth, float(aggregate), _value(table.latency_us) * MICRO, span,
        inside_node=0 < span <= devices_per_node, pairs=pairs, sources=_link_sources(table),
        measured=measured_link(table.measured) if table.measured else None,
    )  # fmt: skip


def _link_sources(table: LinkTable) -> dict[str, str]:
    numbers = {name: getattr(table, name) for name in ("bandwidth_gb_s", "aggregate_gb_s", "latency_us")}
    given = {name: value for name, value in numbers.items() if value is not UNSET}
    return {name: str(value[1]) if isinstance(value, list) else "cluster file" for name, value in given.items()}


def _value(number: Number) -> float:
    if not isinstance(number, list):
        return float(number)
    if len(number) == 2 and isinstance(number[0], int | float) and isinstance(number[1], str) and 0 < number[0] <= 1e9:
        return float(number[0])
    raise InputError(f"{number} is not a number with its source", valid='[80, "datasheet"], the number above 0')


def _scaled(number: Number | UnsetType, unit: float, default: float) -> Any:
    if isinstance(number, UnsetType):
        return default
    scaled = _value(number) * unit
    return round(scaled) if unit == GIB else scaled
