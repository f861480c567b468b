"""The options of a run, the same for `train` and for `launch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from meshwright.base.tables import convert
from meshwright.cli.common import F
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.run.options import Training

_OPTIONS = (
    click.option(
        "--data", default="synthetic", help="synthetic (default), a prepared folder, or a text, JSONL or Parquet file."
    ),
    click.option("--steps", type=click.IntRange(min=1), required=True, help="Steps to train, in all."),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**63 - 1),
        default=0,
        help="Of fresh weights and of the order of samples (default 0).",
    ),
    click.option(
        "--lr", type=click.FloatRange(min=0, min_open=True), default=3e-4, help="Highest rate (default 3e-4)."
    ),
    click.option("--warmup", type=click.IntRange(min=0), default=2, help="Steps over which it rises (default 2)."),
    click.option(
        "--decay", type=click.Choice(["cosine", "linear", "constant"]), default="cosine", help="How it falls."
    ),
    click.option(
        "--clip", type=click.FloatRange(min=0), default=1.0, help="Largest norm of gradients; 0: any (default 1)."
    ),
    click.option("--weight-decay", type=click.FloatRange(min=0), default=0.1, help="Default 0.1."),
    click.option(
        "--balance",
        type=click.Choice(["sample", "batch"]),
        default="sample",
        help="What the balance loss of a mixture is of: every sample (default), or the whole batch.",
    ),
    click.option(
        "--eval-every", "evaluate_every", type=click.IntRange(min=0), default=0, help="Steps between evaluations."
    ),
    click.option("--output", "-o", default="", help="The run's folder: plan, events, checkpoints."),
    click.option(
        "--save-every", type=click.IntRange(min=0), default=0, help="Steps between checkpoints (default: the end)."
    ),
    click.option("--keep", type=click.IntRange(min=1), default=2, help="Checkpoints to keep (default 2)."),
    click.option("--resume", is_flag=True, help="Go on from the last whole checkpoint of --output, under any plan."),
    click.option(
        "--auto-resume", is_flag=True, help="The same where there is one, else begin: for jobs that are started again."
    ),
    click.option("--init-from", default="", help="First weights: a folder with Hugging Face safetensors."),
    click.option("--export", default="", help="Write the trained model there, as transformers reads it."),
    click.option("--lora", type=click.IntRange(min=0), default=0, help="Train adapters of this rank, not the weights."),
    click.option(
        "--dynamic-precision", "dynamic", is_flag=True, help="Every product in the coarsest type that will do."
    ),
    click.option("--guard/--no-guard", default=True, help="Leave out steps whose loss is far too high (default: do)."),
    click.option(
        "--wait",
        type=click.FloatRange(min=0),
        default=0.0,
        metavar="SECONDS",
        help="How long a rank may let others wait before the run fails (default: 20 predicted steps, 300 at least).",
    ),
    click.option("--profile", default="", help="Write a trace of three steps per process to this folder."),
)


def training_options(verb: F) -> F:
    """Add the options of a run: length, data, learning rate, outputs."""
    for option in reversed(_OPTIONS):
        verb = option(verb)
    return verb


def run_of(options: dict[str, Any]) -> Training:
    """Return the run that the options describe; an error is reported at its option."""
    from meshwright.run.options import Training

    try:
        return convert(options, Training)
    except InputError as error:
        name = {"evaluate_every": "eval-every"}.get(error.field, error.field)
        error.field = f"--{name.replace('_', '-')}"
        raise
