"""meshwright schema"""

from __future__ import annotations

import click

from meshwright.cli.common import as_json


@click.command("schema")
@as_json
def command(json_: bool) -> None:
    """Print the JSON Schema of the plan document, for editors and other programs.

    Put {"$schema": "plan.schema.json"} into a plan to have an editor check it while you type.
    """
    from meshwright.base.files import pretty_json
    from meshwright.plans import schema

    click.echo(pretty_json(schema(), 120), nl=False)
