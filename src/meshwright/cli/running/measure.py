"""meshwright measure"""

from __future__ import annotations

from typing import Any

import click

from meshwright.cli.common import as_json, complete_models, console, plan_options, print_json

EPILOG = """
\b
Examples:
  meshwright measure                             this machine, to cluster.toml; minutes
  meshwright measure --devices 4 -o four.toml    four of its devices, or four processes of its CPU
  meshwright plan llama3-8b cluster.toml --batch 64     plans with what was measured
  meshwright measure --model llama3-8b --seq 8192       layers of a model: expected and seen
  torchrun --nnodes 2 --nproc-per-node 8 ... -m meshwright measure -o cluster.toml   nodes and their links
  meshwright measure --on ray --address HOST:6379       the same on all nodes of a cluster of Ray
\b
Times matrix products of real shapes, attention, passes over memory, the optimizer, copies to and from the host, how fast
kernels are issued and, between several devices, every collective on every tier of links. A run that was interrupted goes
on where it stopped (OUTPUT.partial.json). Timings that spread too much are repeated; if they still do, or do not fit into
their time, what there is is written with a note.
Exit codes: 0 written; 1 a process was lost; 2 bad input.
"""


@click.command("measure", epilog=EPILOG)
@click.option("--output", "-o", default="cluster.toml", help="The cluster file to write (default cluster.toml).")
@click.option("--devices", type=click.IntRange(min=1), help="How many of this machine's (default: all).")
@click.option("--on", type=click.Choice(["ray"]), help="Measure all nodes of a running cluster of Ray.")
@click.option("--address", default="", help="Of that cluster, HOST:PORT (default: the one of this machine).")
@click.option("--model", help="Time the layers of this model instead.", shell_complete=complete_models)
@click.option("--cluster", help="Whose curves expect them (default: the catalogue's of this machine).")
@plan_options
@as_json
def command(
    output: str,
    devices: int | None,
    on: str | None,
    address: str,
    model: str | None,
    cluster: str | None,
    json_: bool,
    **options: Any,
) -> None:
    """Measure what this machine does, and write it as a cluster that plans are made for."""
    if model:
        _layers(model, cluster or "local:1", options, json_)
        return
    from meshwright.cli.describing.clusters import cluster_facts
    from meshwright.clusters import Cluster
    from meshwright.measurement.measure import measure
    from meshwright.measurement.progress import bar

    with bar() as tell:
        if on == "ray":
            from meshwright.launchers.ray.measure import measure as measure_on_ray

            found: Cluster | None = measure_on_ray(output, devices or 0, tell, address=address)
        else:
            found = measure(output, devices or 0, tell)
    if found is None:
        return
    if json_:
        print_json(cluster_facts(found))
        return
    screen = console()
    for group in found.groups:
        seen = group.device.measured
        assert seen is not None
        for kind, product in seen.products.items():
            peak = group.device.flops.get(kind, 0.0)
            part = f", {product.rate / peak:.0%} of its peak" if peak else ""
            screen.print(f"{group.device.title}: products in {kind} {product.rate / 1e12:.4g} TFLOP/s{part}")
        if "uncertain: " in seen.how:
            click.echo(f"note: {seen.how.partition('; ')[2]}", err=True)
        screen.print(f"memory {(seen.memory or 0) / 1e9:.4g} GB/s, {1e6 * (seen.launch or 0):.3g} us to issue a kernel")
    screen.print(f"written to {output}")


def _layers(model: str, cluster: str, options: dict[str, Any], json_: bool) -> None:
    """Print every kind of layer of a model: measured, and predicted by the cost model."""
    from dataclasses import asdict

    from rich.table import Table

    from meshwright.cli.common import job_of
    from meshwright.clusters import Cluster
    from meshwright.measurement.measure import layers

    cpu = Cluster.load(cluster).device(0).architecture == "cpu"
    usual = {"batch": 1, "precision": "fp32" if cpu else "bf16"}
    job = job_of(model, cluster, {**options, **{k: v for k, v in usual.items() if options.get(k) is None}})
    screen = console()
    with screen.status("") as status:
        rows = layers(job, lambda name: status.update(f"timing {name}"))
    if json_:
        print_json([asdict(row) for row in rows])
        return
    table = Table(
        title=f"{job.model.name}, {job.global_batch} x {job.seq_len} tokens, {job.precision}: expected / seen"
    )
    for column in ("layer", "count", "forward ms", "backward ms", "... repeated ms", "kept MiB", "error of a step"):
        table.add_column(column, justify="left" if column == "layer" else "right")
    for row in rows:
        pairs = [(getattr(row.expected, name), getattr(row.seen, name)) for name in ("forward", "backward", "repeated")]
        both = [sum(pair[i] for pair in pairs[:2]) for i in (0, 1)]
        cells = [f"{1e3 * a:.3f} / {1e3 * b:.3f}" for a, b in pairs]
        kept = f"{row.expected.kept / 2**20:.1f} / {row.seen.kept / 2**20:.1f}"
        table.add_row(row.name, str(row.count), *cells, kept, f"{both[0] / both[1] - 1:+.1%}")
    screen.print(table)
