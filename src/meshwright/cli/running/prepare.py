"""meshwright prepare INPUT... -o FOLDER"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from meshwright.base.units import size
from meshwright.cli.common import as_json, print_json
from meshwright.cli.planning.search_options import Watch

if TYPE_CHECKING:
    from meshwright.run.data.manifest import Manifest

EPILOG = """
\b
Examples:
  meshwright prepare corpus.jsonl -o tokens                    every line {"text": "..."} is a document
  meshwright prepare books/ 'web/*.parquet' -o tokens          folders and patterns, in this order
  meshwright prepare corpus.jsonl -o tokens --tokenizer Qwen3-0.6B    a folder with a tokenizer.json
  meshwright prepare chats.jsonl -o tokens --field content     the text is in another field
  meshwright prepare crawl.jsonl -o tokens --skip-bad          count broken lines instead of stopping
\b
A .txt file is one document; so is a line of .jsonl and a row of .parquet. FOLDER appears when everything is
written: an interrupted run leaves nothing that could be mistaken for data.
Exit codes: 0 done, 1 the disk is full, 2 bad input.
"""


@click.command("prepare", epilog=EPILOG)
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True)
@click.option("-o", "--output", required=True, metavar="FOLDER", type=click.Path(), help="The folder to make.")
@click.option(
    "--tokenizer", default="bytes", metavar="bytes|PATH", show_default=True,
    help="UTF-8 bytes, or a Hugging Face tokenizer.json or a folder that holds one.",
)  # fmt: skip
@click.option("--field", default="text", show_default=True, help="The field or column that holds the text.")
@click.option("--skip-bad", is_flag=True, help="Leave out lines that cannot be read, and say how many.")
@click.option("--overwrite", is_flag=True, help="Replace a folder that was prepared before.")
@as_json
def command(
    inputs: tuple[str, ...], output: str, tokenizer: str, field: str, skip_bad: bool, overwrite: bool, json_: bool
) -> None:
    """Turn text into tokens that training reads: .txt, .jsonl and .parquet files, folders or patterns of them."""
    from meshwright.run.data.prepare import prepare  # numpy is loaded here, not at the start

    with Watch() as watch:

        def progress(done: int, total: int) -> None:
            if sys.stderr.isatty():
                watch.show(f"{size(done)} of {size(total)}", done / max(total, 1))

        made = prepare(
            inputs, output, tokenizer=tokenizer, field=field, skip_bad=skip_bad, overwrite=overwrite, progress=progress
        )
    assert made is not None  # only with `wait` can it be None
    if json_:
        print_json(_facts(made, output))
    else:
        _print(made, output)


def _facts(made: Manifest, output: str) -> dict[str, object]:
    names = ("tokens", "documents", "empty", "skipped", "vocabulary", "dtype", "tokenizer")
    sizes = {"shards": len(made.shards), "bytes": made.tokens * made.width, "sources": len(made.sources)}
    return {"folder": output, **{name: getattr(made, name) for name in names}, **sizes}


def _print(made: Manifest, output: str) -> None:
    stored = f"{size(made.tokens * made.width)} in {_counted(len(made.shards), 'file')}"
    click.echo(f"{_counted(made.documents, 'document')}, {_counted(made.tokens, 'token')} written to {output}")
    click.echo(f"vocabulary {made.vocabulary:,} ({made.tokenizer}), {made.dtype}, {stored}")
    for number, what in ((made.skipped, "bad line"), (made.empty, "empty document")):
        if number:
            click.echo(f"note: {_counted(number, what)} left out")


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
