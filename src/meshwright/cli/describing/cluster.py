"""meshwright cluster detect"""

from __future__ import annotations

import click

from meshwright.cli.common import as_json, print_json
from meshwright.cli.describing.clusters import cluster_facts


@click.group("cluster")
def command() -> None:
    """Find out about the machine at hand."""


EPILOG = """
\b
Examples:
  meshwright cluster detect                    what is in this machine
  meshwright cluster detect -o cluster.toml    keep it, edit it, use it as a cluster
"""


@command.command("detect", epilog=EPILOG)
@click.option("-o", "--output", type=click.Path(), help="Write the cluster as a TOML file.")
@as_json
def detect(output: str | None, json_: bool) -> None:
    """Describe this machine as a cluster of one node.

    Asks nvidia-smi, rocm-smi or npu-smi; without any of them the CPU cores become the devices.
    """
    import tomli_w

    from meshwright.base.files import write_text
    from meshwright.clusters.detect import detect as look
    from meshwright.clusters.parsing import VERSION

    found = look()
    text = tomli_w.dumps({"version": VERSION, **found.table})
    if output:
        write_text(output, text)
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    if json_:
        print_json(cluster_facts(found.cluster) | {"notes": list(found.notes)})
    elif output:
        click.echo(f"{found.cluster.devices} devices written to {output}")
    else:
        click.echo(text, nl=False)
