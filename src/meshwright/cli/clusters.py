"""meshwright clusters [NAME]"""

from __future__ import annotations

from typing import Any

import click

from meshwright.cli.common import as_json, complete_clusters, console, print_json
from meshwright.cluster import Cluster, Device, Group, Link, device, device_aliases, device_names, source
from meshwright.cluster.catalogue import find_device, server_size
from meshwright.errors import UnknownName
from meshwright.units import rate, size

EPILOG = """
\b
Examples:
  meshwright clusters                                every device of the catalogue
  meshwright clusters h100                           one device, with the source of every number
  meshwright clusters 8x8xh100                       8 nodes of 8 devices
  meshwright clusters 2x8xa100-80gb+4x8xv100-32gb    different groups in one cluster
  meshwright clusters cluster.toml                   anything else, in a file
"""


@click.command("clusters", epilog=EPILOG)
@click.argument("name", required=False, shell_complete=complete_clusters)
@as_json
def command(name: str | None, json_: bool) -> None:
    """List the hardware known by name, or show what a cluster is made of.

    NAME is a device, a cluster such as 8x8xh100 (nodes x devices per node x device, groups joined
    by +), local for this machine, or a TOML file. Link bandwidths are per device and direction.
    """
    if name is None:
        _list(json_)
        return
    cluster = _find(name)
    if json_:
        print_json(cluster_facts(cluster))
    else:
        _show(cluster)


def _find(name: str) -> Cluster:
    """A bare device means the server it is usually sold in."""
    try:
        key = find_device(name)
    except UnknownName:
        return Cluster.load(name)
    return Cluster.preset(f"1x{server_size(key)}x{key}")


def _list(json_: bool) -> None:
    rows = [device(name) for name in device_names()]
    if json_:
        print_json([device_facts(row) | {"aliases": list(device_aliases(row.name))} for row in rows])
        return
    from rich.table import Table

    out = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("device", no_wrap=True, max_width=max(out.width - 96, 8))  # titles give way, numbers do not
    for heading in ("memory", "bandwidth", "fp32", "16-bit", "fp8", "fp4", "per node"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        peaks = [
            row.flops.get("fp32"),
            row.flops.get("bf16", row.flops.get("fp16")),
            row.flops.get("fp8"),
            row.flops.get("fp4"),
        ]
        cells = [f"{peak / 1e12:,.5g}" if peak else "" for peak in peaks]
        table.add_row(
            row.name, row.title, size(row.memory), rate(row.memory_bandwidth), *cells, str(server_size(row.name))
        )
    out = console()
    out.print(table)
    out.print(
        "\nPeaks are dense TFLOP/s. 'meshwright clusters h100' shows links and the source of every number.", style="dim"
    )


def device_facts(row: Device) -> dict[str, Any]:
    return {
        "name": row.name,
        "title": row.title,
        "vendor": row.vendor,
        "memory_bytes": row.memory,
        "memory_bytes_per_s": row.memory_bandwidth,
        "flops": row.flops,
        "host_bytes_per_s": row.host_bandwidth,
        "sources": {field: _source(identifier) for field, identifier in row.sources.items()},
    }


def _source(identifier: str) -> str:
    """The document's title; sources of the user's own are what they are."""
    try:
        return source(identifier)["title"]
    except KeyError:
        return identifier


def cluster_facts(cluster: Cluster) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": cluster.name, "devices": cluster.devices}
    facts["groups"] = [_group_facts(group) for group in cluster.groups]
    if cluster.between:
        facts["between"] = _link_facts(cluster.between)
    return facts


def _group_facts(group: Group) -> dict[str, Any]:
    return {
        "nodes": group.nodes,
        "devices_per_node": group.devices_per_node,
        "host_memory_bytes": group.host_memory,
        "device": device_facts(group.device),
        "links": [_link_facts(link) for link in group.links],
    }


def _link_facts(link: Link) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "kind": link.kind,
        "topology": link.topology,
        "span": link.span or None,
        "bytes_per_s": link.bandwidth,
        "aggregate_bytes_per_s": link.aggregate,
        "latency_s": link.latency,
    }
    if link.pairs:
        facts["pairs"] = [{"devices": [a, b], "bricks": n} for a, b, n in link.pairs]
    facts["sources"] = {field: _source(identifier) for field, identifier in link.sources.items()}
    return facts


def _show(cluster: Cluster) -> None:
    from rich.text import Text

    out = console()
    out.print(Text(f"{cluster.name}: {cluster.devices} devices", style="bold"))
    used: dict[str, int] = {}
    for number, group in enumerate(cluster.groups):
        out.print(f"\ngroup {number}: {group.nodes} nodes x {group.devices_per_node} {group.device.title}")
        out.print(_numbers(group.device, used))
        out.print(_links(group, used))
    if cluster.between:
        link = cluster.between
        out.print(f"\nbetween groups: {link.kind} {link.topology}, {rate(link.bandwidth)}, {link.latency * 1e6:.3g} us")
    out.print(Text("\nSources"))
    for identifier, number in used.items():
        out.print(Text(f"[{number}] {_source(identifier)}", style="dim"), soft_wrap=True)


def _numbers(row: Device, used: dict[str, int]) -> Any:
    from rich.table import Table

    def mark(field: str) -> str:
        identifier = row.sources.get(field)
        return f"[{used.setdefault(identifier, len(used) + 1)}]" if identifier else ""

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("  memory", size(row.memory), mark("memory_gib"))
    table.add_row("  memory bandwidth", rate(row.memory_bandwidth), mark("memory_gb_s"))
    table.add_row("  to the host", rate(row.host_bandwidth), mark("host_gb_s"))
    for precision, peak in row.flops.items():
        table.add_row(f"  {precision}", f"{peak / 1e12:,.4g} TFLOP/s", mark(f"tflops.{precision}"))
    return table


def _links(group: Group, used: dict[str, int]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("  link", "topology", "joins", "per device", "per node", "latency", ""):
        table.add_column(heading, no_wrap=True)
    for link in group.links:
        joins = f"{link.span} devices" if link.span else "all nodes"
        marks = sorted({used.setdefault(i, len(used) + 1) for i in link.sources.values()})
        numbers = (rate(link.bandwidth), rate(link.aggregate), f"{link.latency * 1e6:.3g} us")
        table.add_row(f"  {link.kind}", link.topology, joins, *numbers, "".join(f"[{n}]" for n in marks))
    return table
