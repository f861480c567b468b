"""meshwright glossary [TERM]"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from importlib import resources

import click

from meshwright.cli.common import as_json, print_json
from meshwright.errors import UnknownName

EPILOG = """
\b
Examples:
  meshwright glossary               every term
  meshwright glossary zero1         what it means, and the file to read first
  meshwright glossary "context parallelism"   other names of a term are found, too
"""


@dataclass(frozen=True)
class Term:
    """Term of plans, messages and documentation."""

    name: str
    also: str  # other names, separated by commas
    text: str
    file: str  # of the source: the file to read first
    about: str  # section of the glossary

    @property
    def names(self) -> list[str]:
        """Every name of the term, in the form that is compared."""
        return [_plain(name) for name in (self.name, *self.also.split(",")) if name.strip()]


def terms() -> list[Term]:
    """Return all terms in the order of the glossary."""
    table = tomllib.loads(resources.files(__package__).joinpath("glossary.toml").read_text("utf-8"))
    return [
        Term(name, facts[0], facts[1], facts[2], about) for about, rows in table.items() for name, facts in rows.items()
    ]


def find(name: str) -> list[Term]:
    """Return the terms with this name: its own first, then those that have it among their other names.

    >>> [term.name for term in find("ZeRO-1")]
    ['zero1']
    """
    wanted, every = _plain(name), terms()
    found = sorted((term for term in every if wanted in term.names), key=lambda term: _plain(term.name) != wanted)
    if not found:
        known = sorted({each for term in every for each in term.names})
        raise UnknownName("term", name, known, see="meshwright glossary")
    return found


def markdown() -> str:
    """Return the glossary as a page of the documentation."""
    lines = [
        "# Glossary",
        "",
        "`meshwright glossary TERM` prints one of these. Files are those of `src/meshwright/`.",
        "",
    ]
    for about in dict.fromkeys(term.about for term in terms()):
        lines += [f"## {about.capitalize()}", "", "| term | also | meaning | file |", "| --- | --- | --- | --- |"]
        lines += [f"| {t.name} | {t.also} | {t.text} | `{t.file}` |" for t in terms() if t.about == about]
        lines += [""]
    return "\n".join(lines)


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", " ").replace("_", " ").removesuffix("s")


@click.command("glossary", epilog=EPILOG)
@click.argument("term", required=False)
@as_json
def command(term: str | None, json_: bool) -> None:
    """Say what a term means, and which file to read first; without TERM: all of them."""
    found = find(term) if term else terms()
    if json_:
        print_json([asdict(each) for each in found])
        return
    if not term:
        width = max(len(each.name) for each in found)
        for each in found:
            click.echo(f"{each.name:{width}}  {each.also}")
        click.echo("\n'meshwright glossary zero1' says what one of them means.")
        return
    for each in found:
        click.echo(
            f"{each.name}{f'  ({each.also})' if each.also else ''}\n  {each.text}\n  read: src/meshwright/{each.file}"
        )
