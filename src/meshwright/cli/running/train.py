"""meshwright train MODEL"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.common import as_json, complete_models, console, plan_options
from meshwright.cli.running.training_options import run_of, training_options
from meshwright.errors import STOPPED

if TYPE_CHECKING:
    from meshwright.plans import Job, Plan
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
Ctrl-C, SIGTERM and SIGUSR1 to any process end the run after a whole step, with a checkpoint where there is an --output.
Exit codes: 0 trained to the end; 1 the run failed or nothing fits; 2 bad input; 3 stopped early.
"""


@click.command("train", epilog=EPILOG)
@click.argument("model", required=False, shell_complete=complete_models)
@click.option("--plan", "plan_", metavar="PLAN", help="A plan.json, or a short plan such as tp=2,pp=2,zero=1.")
@click.option("--cluster", help="Where to train: local (default), local:4, or a .toml file under a launcher.")
@plan_options
@training_options
@as_json
def command(model: str | None, plan_: str | None, cluster: str | None, json_: bool, **options: Any) -> None:
    """Train a model under a plan, on this machine or as one of many processes.

    MODEL is a preset (tiny-llama, tiny-gpt2, tiny-moe for laptops) or a config.json; a plan.json has its own.
    """
    from meshwright.cli.running.training import job_and_plan, said_once

    given = {name: options.pop(name) for name in ("batch", "seq", "precision", "optimizer")}
    with said_once():
        job, plan = job_and_plan(model, plan_, cluster, given)
        start(job, plan, run_of(options), json_=json_)


def start(job: Job, plan: Plan, run: Training, *, json_: bool) -> None:
    """Train on this machine, or as one of many ranks."""
    from meshwright.cli.running.training import Screen, first, say_plan
    from meshwright.run import train

    promised = train.check(job, plan, run)
    train.make_folders(run)
    if json_:
        stopped = train.start(plan, run, promised, print_step, ours=True)
    else:
        if first():
            say_plan(console(), job, plan, promised)
        with Screen(run.steps) as screen:
            stopped = train.start(plan, run, promised, screen, ours=True)
    if stopped:
        sys.exit(STOPPED)


def print_step(event: dict[str, Any]) -> None:
    """Print one object per step, and one per evaluation; other events are in the run's folder."""
    from meshwright.base.files import line_of

    if event["event"] == "step":
        click.echo(line_of({key: value for key, value in event.items() if key not in ("event", "time")}))
    elif event["event"] == "evaluation":
        click.echo(line_of({"step": event["step"], "evaluation_loss": event["loss"]}))
    sys.stdout.flush()
