"""meshwright completion SHELL"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

EPILOG = """
\b
Examples:
  eval "$(meshwright completion bash)"                            in ~/.bashrc
  eval "$(meshwright completion zsh)"                             in ~/.zshrc
  meshwright completion fish > ~/.config/fish/completions/meshwright.fish
"""


@click.command("completion", epilog=EPILOG)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of a shell: verbs, options, model and cluster names."""
    from meshwright.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "meshwright", "_MESHWRIGHT_COMPLETE").source())
