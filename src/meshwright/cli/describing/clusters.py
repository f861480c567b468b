"""meshwright clusters [NAME]"""

from __future__ import annotations

from typing import Any

import click

from meshwright.base.units import MICRO, TERA, rate, size
from meshwright.cli.common import as_json, complete_clusters, console, print_json
from meshwright.clusters import Cluster, Device, Group, Link, device, device_aliases, device_names
from meshwright.clusters.catalogue import server_size

EPILOG = """
\b
Examples:
  meshwright clusters                                every device of the catalogue
  meshwright clusters 8xh100                         8 devices in their usual server, with the source of every number
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
    cluster = Cluster.load(name)
    if json_:
        print_json(cluster_facts(cluster))
    else:
        _show(cluster)


def _list(json_: bool) -> None:
    rows = [device(name) for name in device_names()]
    if json_:
        print_json([device_facts(row) | {"aliases": list(device_aliases(row.name))} for row in rows])
        return
    from rich.table import Table

    out = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ["name", "device", "memory", "bandwidth", "fp32", "16-bit", "fp8", "fp4", "per node"]
    narrow = {"device", "per node"} if out.width < 112 else set()
    for heading in columns:
        if heading not in narrow:
            left = heading in {"name", "device"}
            table.add_column(heading, no_wrap=True, justify="left" if left else "right")
    for row in rows:
        peaks = (
            row.flops.get("fp32"),
            row.flops.get("bf16", row.flops.get("fp16")),
            row.flops.get("fp8"),
            row.flops.get("fp4"),
        )
        shown = [f"{peak / TERA:,.5g}" if peak else "" for peak in peaks]
        facts = [row.name, row.title[: out.width - 90], size(row.memory), rate(row.memory_bandwidth)]
        cells = [*facts, *shown, str(server_size(row.name))]
        table.add_row(*(cell for heading, cell in zip(columns, cells, strict=True) if heading not in narrow))
    out.print(table)
    out.print(
        "\nPeaks are dense TFLOP/s. 'meshwright clusters 8xh100' shows links and the source of every number.",
        style="dim",
    )


def device_facts(row: Device) -> dict[str, Any]:
    return {
        "name": row.name,
        "title": row.title,
        "vendor": row.vendor,
        "memory_bytes": row.memory,
        "memory_bytes_per_s": round(row.memory_bandwidth),
        "flops": {name: round(peak) for name, peak in row.flops.items()},
        "host_bytes_per_s": round(row.host_bandwidth) or None,
        "sources": dict(row.sources),
    }


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
        "bytes_per_s": round(link.bandwidth),
        "aggregate_bytes_per_s": round(link.aggregate),
        "latency_s": float(f"{link.latency:.6g}"),
    }
    if link.pairs:
        facts["pairs"] = [{"devices": [a, b], "bricks": n} for a, b, n in link.pairs]
    facts["sources"] = dict(link.sources)
    return facts


def _show(cluster: Cluster) -> None:
    from rich.text import Text

    out = console()
    out.print(Text(f"{cluster.name}: {cluster.devices} devices", style="bold"))
    used: dict[str, int] = {}
    for number, group in enumerate(cluster.groups):
        nodes = "1 node" if group.nodes == 1 else f"{group.nodes} nodes"
        host = f", {size(group.host_memory)} of host memory per node" if group.host_memory else ""
        out.print(f"\ngroup {number}: {nodes} x {group.devices_per_node} {group.device.title}{host}")
        out.print(_numbers(group.device, used))
        out.print(_links(group, used))
    if cluster.between:
        link = cluster.between
        out.print(
            f"\nbetween groups: {link.kind} {link.topology}, {rate(link.bandwidth)}, {link.latency / MICRO:.3g} us"
        )
    out.print(Text("\nSources"))
    for text, number in used.items():
        out.print(Text(f"[{number}] {text}", style="dim"), soft_wrap=True)


def _numbers(row: Device, used: dict[str, int]) -> Any:
    from rich.table import Table

    def mark(field: str) -> str:
        identifier = row.sources.get(field)
        return f"[{used.setdefault(identifier, len(used) + 1)}]" if identifier else ""

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("  memory", size(row.memory), mark("memory_gib"))
    table.add_row("  memory bandwidth", rate(row.memory_bandwidth), mark("memory_gb_s"))
    host = rate(row.host_bandwidth) if row.host_bandwidth else "not known"
    table.add_row("  to the host", host, mark("host_gb_s"))
    for precision, peak in row.flops.items():
        table.add_row(f"  {precision}", f"{peak / TERA:,.4g} TFLOP/s", mark(f"tflops.{precision}"))
    return table


def _links(group: Group, used: dict[str, int]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("  link", "topology", "joins", "per device", "per node", "latency", ""):
        table.add_column(heading, no_wrap=True)
    for link in group.links:
        joins = f"{link.span} devices" if link.span else "all nodes"
        marks = sorted({used.setdefault(i, len(used) + 1) for i in link.sources.values()})
        numbers = (rate(link.bandwidth), rate(link.aggregate), f"{link.latency / MICRO:.3g} us")
        table.add_row(f"  {link.kind}", link.topology, joins, *numbers, "".join(f"[{n}]" for n in marks))
    return table
