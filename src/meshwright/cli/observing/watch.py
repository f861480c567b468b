"""meshwright watch"""

from __future__ import annotations

import sys
from typing import Any

import click

from meshwright.base.files import writable, write_text
from meshwright.cli.common import as_json
from meshwright.errors import InputError

EPILOG = """
\b
Examples:
  meshwright watch train.py                             every call of the script's own functions, as text
  meshwright watch train.py --target model:Block.forward --attributes 'loss*' -- --lr 0.1
                                                        one method, attributes of its object; arguments of the script
  meshwright watch -m pkg.train --target pkg.model:Block --wrapper tensor
                                                        a module; shapes, types, least, greatest and norm of tensors
  torchrun --nproc-per-node 4 -m meshwright watch train.py --target train:Trainer -o run
                                                        all ranks, each to run.rankN.jsonl
  meshwright watch --show run                           what all ranks did, by time
  meshwright watch --diff 0,1 run                       where do two ranks part ways?
  meshwright watch --perfetto run.json run              the calls as a picture, for ui.perfetto.dev
\b
A target is pkg.module, pkg.module:Class, pkg.module:Class.method or pkg.module:function; the script itself is known by
its name without .py. Attributes are those of the object a watched method runs on. Code that is no target runs at full speed.
Exit codes: those of the program; of --diff 0 the same, 1 different; 2 bad input. docs/watch.md says more.
"""


@click.command("watch", epilog=EPILOG)
@click.argument("words", nargs=-1, metavar="SCRIPT [-- ARGUMENTS] | FILES", type=click.UNPROCESSED)
@click.option("--module", "-m", is_flag=True, help="The first word is a module, as in python -m.")
@click.option("--target", "-t", "targets", multiple=True, metavar="TARGET", help="What to watch; may be repeated.")
@click.option("--attributes", metavar="A,B*", help="Follow these attributes; '*' for all.")
@click.option("--locals", "locals_", metavar="A,B*", help="Follow local variables of watched calls.")
@click.option("--globals", "globals_", metavar="A,B*", help="Follow global variables of watched modules.")
@click.option("--ranks", metavar="0,3", help="Watch these ranks only (default: all).")
@click.option("--wrapper", metavar="NAME", help="Words beside events: plain, tensor, memory, or module:Class.")
@click.option("--output", "-o", metavar="NAME", help="Write NAME.rankN.jsonl instead of text to standard error.")
@click.option("--show", is_flag=True, help="Print the events of streams, merged by time.")
@click.option("--diff", metavar="0,1", help="Show where two ranks part ways.")
@click.option("--perfetto", type=click.Path(), metavar="FILE", help="Write the events of streams as a Chrome trace.")
@as_json
def command(
    words: tuple[str, ...], module: bool, targets: tuple[str, ...], attributes: str | None, locals_: str | None,
    globals_: str | None, ranks: str | None, wrapper: str | None, output: str | None, show: bool, diff: str | None,
    perfetto: str | None, json_: bool,
) -> None:  # fmt: skip
    """Run a program and follow calls, attributes and exceptions inside it; or read what was followed.

    With --show, --diff or --perfetto the words are streams: files, or the NAME that -o gave.
    """
    running: dict[str, Any] = {
        "--module": module, "--target": targets, "--attributes": attributes, "--locals": locals_, "--globals": globals_,
        "--wrapper": wrapper, "--output": output,
    }  # fmt: skip
    reading = [option for option, value in (("--show", show), ("--diff", diff), ("--perfetto", perfetto)) if value]
    if not words:
        raise InputError("is needed", field="SCRIPT", valid="a script, or streams with --show, --diff or --perfetto")
    if reading:
        for option, value in running.items():
            if value:
                raise InputError(f"does not go with {reading[0]}", field=option)
        _read(words, show=show, diff=diff, perfetto=perfetto, ranks=ranks, json_=json_)
        return
    if json_:
        raise InputError("goes with --show and --diff; a run writes JSON with --output", field="--json")
    options = {
        "attributes": attributes or False, "locals": locals_ or False, "globals": globals_ or False,
        "ranks": None if ranks is None else _numbers("--ranks", ranks), "wrapper": wrapper, "output": output,
    }  # fmt: skip
    _run(words, targets, module, options)


def _run(words: tuple[str, ...], targets: tuple[str, ...], module: bool, options: dict[str, Any]) -> None:
    from meshwright.watcher.script.script import run

    def tell(problem: InputError) -> None:
        click.echo(f"error: {problem}", err=True)

    ended = run(words, targets, tell, module=module, **options)
    for name in ended.never:
        click.echo(f"note: '{name}' was never imported, so nothing of it was watched", err=True)
    sys.exit(ended.code or (InputError.exit_code if ended.mistaken else 0))


def _read(
    words: tuple[str, ...], *, show: bool, diff: str | None, perfetto: str | None, ranks: str | None, json_: bool
) -> None:
    from meshwright.watcher.events import compare, events, text
    from meshwright.watcher.events import perfetto as chrome

    if perfetto:
        writable("--perfetto", perfetto)
    pair = _numbers("--diff", diff) if diff else []
    if diff and len(pair) != 2:
        raise InputError(f"is '{diff}'", field="--diff", valid="two ranks, such as 0,1")
    wanted = None if ranks is None else set(_numbers("--ranks", ranks))
    empty: list[str] = []
    everything = events.merged(events.find(words), empty)
    found = [one for one in everything if wanted is None or one.rank in wanted]
    for path in empty:
        if events.rank_named(path) in set(pair) - {one.rank for one in everything}:
            raise InputError("holds no events", file=path)
        click.echo(f"note: {path} holds no events: its process ended as it began to write", err=True)
    if show:
        for event in found:
            click.echo(events.json_of(event) if json_ else text.line_of(event))
    if perfetto:
        write_text(perfetto, chrome.trace_of(found))
        if not json_:
            click.echo(f"trace: {perfetto}")
    if diff:
        answer = compare.compare(found, pair[0], pair[1])
        click.echo(compare.json_of(answer) if json_ else "\n".join(compare.lines_of(answer)))
        sys.exit(0 if answer.same else 1)


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and part.isascii() for part in parts):
        raise InputError(f"is '{text}'", field=option, valid="numbers from 0, such as 0,3")
    return [int(part) for part in parts]
