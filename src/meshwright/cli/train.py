"""meshwright train MODEL"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.common import as_json, complete_models, console, plan_options

if TYPE_CHECKING:
    from meshwright.plan import Job, Plan
    from meshwright.run.options import Training

EPILOG = """
\b
Examples:
  meshwright train tiny-llama --data synthetic --steps 20
  meshwright train tiny-llama --cluster local:4 --batch 8 --seq 64 --data synthetic --steps 20
  meshwright train tiny-moe --plan "dp=2,ep=2,zero=1" --batch 8 --seq 64 --data notes.txt --steps 50 -o run
  meshwright train --plan plan.json --data tokens/ --steps 1000 -o run --save-every 100
  meshwright train --plan plan.json --data tokens/ --steps 1000 -o run --resume
  meshwright train Qwen3-0.6B/config.json --init-from Qwen3-0.6B --data chat.jsonl --steps 200 --export tuned
\b
Without --plan the best plan for the cluster is searched first. A short plan (tp=2,pp=2) needs as many processes as its
degrees multiply to. Processes are started on this machine; under torchrun the same command joins the others:
  torchrun --nproc-per-node 8 -m meshwright train --plan plan.json --data tokens/ --steps 1000
\b
--json prints one object per step: step, loss, grad_norm, step_time_s, predicted_step_time_s, peak_memory_bytes, mfu;
with --eval-every also one per evaluation: step, evaluation_loss.
Ctrl-C and SIGTERM end the run after a whole step, with a checkpoint where there is an --output.
Exit codes: 0 trained, or stopped when asked; 1 the run failed or nothing fits; 2 bad input.
"""


@click.command("train", epilog=EPILOG)
@click.argument("model", required=False, shell_complete=complete_models)
@click.option("--plan", "plan_", metavar="PLAN", help="A plan.json, or a short plan such as tp=2,pp=2,zero=1.")
@click.option("--cluster", help="Where to train: local (default), local:4, or a .toml file under a launcher.")
@plan_options
@click.option(
    "--data", default="synthetic", help="synthetic (default), a prepared folder, or a text, JSONL or Parquet file."
)
@click.option("--steps", type=click.IntRange(min=1), required=True, help="Steps to train, in all.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    help="Of fresh weights and of the order of samples (default 0).",
)
@click.option("--lr", type=click.FloatRange(min=0, min_open=True), default=3e-4, help="Highest rate (default 3e-4).")
@click.option("--warmup", type=click.IntRange(min=0), default=2, help="Steps over which it rises (default 2).")
@click.option("--decay", type=click.Choice(["cosine", "linear", "constant"]), default="cosine", help="How it falls.")
@click.option(
    "--clip", type=click.FloatRange(min=0), default=1.0, help="Largest norm of gradients; 0: any (default 1)."
)
@click.option("--weight-decay", type=click.FloatRange(min=0), default=0.1, help="Default 0.1.")
@click.option(
    "--eval-every", "evaluate_every", type=click.IntRange(min=0), default=0, help="Steps between evaluations."
)
@click.option("--output", "-o", default="", help="The run's folder: plan, events, checkpoints.")
@click.option(
    "--save-every", type=click.IntRange(min=0), default=0, help="Steps between checkpoints (default: the end)."
)
@click.option("--keep", type=click.IntRange(min=1), default=2, help="Checkpoints to keep (default 2).")
@click.option("--resume", is_flag=True, help="Go on from the last whole checkpoint of --output, under any plan.")
@click.option("--init-from", default="", help="First weights: a folder with Hugging Face safetensors.")
@click.option("--export", default="", help="Write the trained model there, as transformers reads it.")
@click.option("--lora", type=click.IntRange(min=0), default=0, help="Train adapters of this rank, not the weights.")
@click.option("--dynamic-precision", "dynamic", is_flag=True, help="Every product in the coarsest type that will do.")
@click.option("--guard/--no-guard", default=True, help="Leave out steps whose loss is far too high (default: do).")
@click.option("--profile", default="", help="Write a trace of three steps per process to this folder.")
@as_json
def command(model: str | None, plan_: str | None, cluster: str | None, json_: bool, **options: Any) -> None:
    """Train a model under a plan, on this machine or as one of many processes.

    MODEL is a preset (tiny-llama, tiny-gpt2, tiny-moe for laptops) or a config.json; a plan.json has its own.
    """
    from meshwright.cli.training import job_and_plan, said_once
    from meshwright.errors import InputError
    from meshwright.run.options import Training
    from meshwright.tables import convert

    given = {name: options.pop(name) for name in ("batch", "seq", "precision", "optimizer")}
    with said_once():
        job, plan = job_and_plan(model, plan_, cluster, given)
        try:
            run = convert(options, Training)
        except InputError as error:
            name = {"evaluate_every": "eval-every"}.get(error.field, error.field)
            error.field = f"--{name.replace('_', '-')}"
            raise
        _start(job, plan, run, json_=json_)


def _start(job: Job, plan: Plan, run: Training, *, json_: bool) -> None:
    from meshwright.cli.training import Screen, first, say_plan
    from meshwright.run.front import check, make_folders, start

    estimate = check(job, plan, run)
    make_folders(plan, run)
    if json_:
        start(job, plan, run, estimate, _print_step)
        return
    if first():
        say_plan(console(), job, plan, estimate)
    with Screen(run.steps) as screen:
        start(job, plan, run, estimate, screen)


def _print_step(event: dict[str, Any]) -> None:
    """One object per step, and one per evaluation; other events are in the run's folder."""
    from meshwright.files import line_of

    if event["event"] == "step":
        click.echo(line_of({key: value for key, value in event.items() if key not in ("event", "time")}))
    elif event["event"] == "evaluation":
        click.echo(line_of({"step": event["step"], "evaluation_loss": event["loss"]}))
    sys.stdout.flush()
