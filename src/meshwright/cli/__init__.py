"""The command line: one thin file per verb, without logic.

Exit codes: 0 done, 1 the job cannot be done, a run failed or a disk is full, 2 bad input, 3 a run was stopped early, 70
a bug of ours. Errors go to standard error in one line; with --json also to standard output as an object.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from typing import NoReturn, TextIO

import click

from meshwright import __version__
from meshwright.errors import BUG, DiskFull, DoesNotFit, InputError, MeshwrightError, closest_names

# verb -> module that holds it; a verb's file is imported only when it is used
VERBS = {
    "models": "meshwright.cli.describing.models",
    "clusters": "meshwright.cli.describing.clusters",
    "cluster": "meshwright.cli.describing.cluster",
    "measure": "meshwright.cli.running.measure",
    "plan": "meshwright.cli.planning.plan",
    "train": "meshwright.cli.running.train",
    "launch": "meshwright.cli.running.launch",
    "explain": "meshwright.cli.planning.explain",
    "compare": "meshwright.cli.planning.compare",
    "sweep": "meshwright.cli.planning.sweep",
    "check": "meshwright.cli.planning.check",
    "show": "meshwright.cli.planning.show",
    "estimate": "meshwright.cli.planning.estimate",
    "export": "meshwright.cli.frameworks.export",
    "import": "meshwright.cli.frameworks.import_",
    "compress": "meshwright.cli.running.compress",
    "prepare": "meshwright.cli.running.prepare",
    "analyze": "meshwright.cli.observing.analyze",
    "watch": "meshwright.cli.observing.watch",
    "glossary": "meshwright.cli.describing.glossary",
    "schema": "meshwright.cli.describing.schema",
    "completion": "meshwright.cli.completion",
}

# library -> the extra of this package that brings it
EXTRAS = {
    "duckdb": "traces", "highspy": "milp", "isal": "traces", "pyarrow": "data", "ray": "ray", "safetensors": "run",
    "tensorboard": "run", "tokenizers": "data", "torch": "run", "zstandard": "traces",
}  # fmt: skip


class Verbs(click.Group):
    """Command group that imports a verb when it is used, so that starting stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = import_module(VERBS[name]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            near = closest_names(args[0], VERBS, limit=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"unknown verb '{args[0]}'{hint}", valid=", ".join(VERBS))
        return super().resolve_command(ctx, args)


EPILOG = """
\b
Start here:
  meshwright models llama3-70b          what a model is made of
  meshwright clusters 8x8xh100          what a cluster is made of
  meshwright plan llama3-70b 8x8xh100 --batch 128 --seq 8192 -o plan.json
                                        the best way to train it, proven
  meshwright explain plan.json          what limits a plan, and what would help
  meshwright compare plan.json tp=8,pp=4   two plans side by side
  meshwright sweep llama3-70b 8x8xh100 --batch 128,256 --seq 4096,8192
                                        which batch, sequence, and number of nodes?
  meshwright show plan.json             a plan as a picture
  meshwright check plan.json            is it valid, and does it fit?
  meshwright train tiny-llama --cluster local:2 --data synthetic --steps 20
                                        plan it, start the processes, train it
  meshwright launch plan.json --on slurm --data tokens/ --steps 1000 -o run
                                        the same on Slurm, Kubernetes, Ray or under torchrun
  meshwright estimate plan.json         how long is a step, and where does the time go?
  meshwright export plan.json --to megatron   the plan in another framework's words
  meshwright import run.sh --from megatron --cluster 8x8xh100   what a script you have means
  meshwright compress explain plan.json   which gradients should travel in fewer bytes?
  meshwright prepare corpus.jsonl -o tokens   text to tokens that training reads
  meshwright analyze traces/            where did the time of a job go? (profiler traces of all ranks)
  meshwright watch train.py --target train:Trainer   calls and changes inside a running program, rank by rank

Every verb has --help, and where it prints facts, --json for programs.
"""


@click.group(cls=Verbs, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="meshwright")
def cli() -> None:
    """Describe a model and a cluster, get the best way to train it, run it, watch it, keep it alive."""


def main() -> None:
    """Run the console script: every input error becomes one clear message and an exit code."""
    if sys.stdout is None:  # closed by the caller: there is no reader
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - stays open until the process ends
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character still gets the rest
    try:
        code = cli.main(standalone_mode=False, prog_name="meshwright")
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except (click.exceptions.Abort, KeyboardInterrupt):
        _write(sys.stderr, "interrupted before there was anything to show")
        sys.exit(130)
    except click.exceptions.NoArgsIsHelpError as helping:
        click.echo(helping.format_message())
        sys.exit(0)
    except click.UsageError as error:
        verb = error.ctx.command_path if error.ctx else "meshwright"
        said = " ".join(error.format_message().split())  # a list of choices comes on several lines
        _fail(InputError(f"{said}{'.' * said[-1:].isalnum()} See '{verb} --help'."))
    except MeshwrightError as error:
        _fail(error)
    except BrokenPipeError:
        _leave_quietly(0)  # the reader has gone; nothing is left to say
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            _bug(error)
        _fail(
            InputError(f"this needs {error.name}, which is not installed", valid=f"pip install 'meshwright[{extra}]'")
        )
    except OSError as error:
        from meshwright.base.files import write_error  # file access is not imported for every start

        found = write_error(error, file="standard output")
        _write(sys.stderr, f"error: {found}")
        _leave_quietly(found.exit_code)
    except Exception as error:
        _bug(error)


def _bug(error: Exception) -> NoReturn:
    traceback.print_exception(error)
    problem = "this is a bug in meshwright; please report it with the lines above"
    _say({"error": f"{type(error).__name__}: {error}"}, problem)
    sys.exit(BUG)


def _fail(error: MeshwrightError) -> NoReturn:
    facts: dict[str, object] = {"error": str(error)}
    if isinstance(error, InputError | DoesNotFit | DiskFull):
        facts = error.as_json()
    enough = getattr(error, "suggestion", "")  # if nothing fits, the search reports what would
    _say(facts, f"{error}; {enough}" if enough else str(error))
    sys.exit(error.exit_code)


def _say(facts: dict[str, object], text: str) -> None:
    """Print an error for programs and for people. Even if it cannot be printed, the exit code tells."""
    if "--json" in sys.argv:
        _write(sys.stdout, json.dumps(facts))
    _write(sys.stderr, f"error: {text}")


def _write(stream: TextIO | None, line: str) -> None:
    """Write and flush now: a failed write must not fail again when the interpreter ends."""
    if stream is None:
        return
    try:
        click.echo(line, file=stream)
        stream.flush()
    except OSError:
        _silence(stream)


def _silence(stream: TextIO) -> None:
    """Redirect a stream's file descriptor, so that the buffer's rest goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _leave_quietly(code: int) -> None:
    """Exit without the interpreter's attempt to flush what cannot be written."""
    _silence(sys.stdout)
    sys.exit(code)
