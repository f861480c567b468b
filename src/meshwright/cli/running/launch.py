"""meshwright launch PLAN --on PLACE"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from meshwright.cli.common import as_json, console, load_plan, print_json
from meshwright.cli.running.training_options import run_of, training_options
from meshwright.errors import STOPPED, InputError

if TYPE_CHECKING:
    from meshwright.cost.estimate import Estimate
    from meshwright.launchers.launch import Where
    from meshwright.launchers.request import Request

PLACES = ("local", "torchrun", "slurm", "kubernetes", "ray")
EPILOG = """
\b
Examples:
  meshwright launch plan.json --on local --data tokens/ --steps 1000 -o run
  meshwright launch plan.json --on slurm --data tokens/ --steps 1000 -o run --partition gpu --time 04:00:00
  meshwright launch plan.json --on slurm --data tokens/ --steps 1000 -o run --write job.sbatch
  meshwright launch plan.json --on torchrun --address node01 --data tokens/ --steps 1000 -o run
  meshwright launch plan.json --on kubernetes --image registry/train:1 --mount shared:/data \\
      --data /data/tokens --steps 1000 -o /data/run --dry-run
  meshwright launch plan.json --on ray --data tokens/ --steps 1000 -o run
\b
Every process runs `meshwright train --plan PLAN` with the options that are given here. Ranks follow the plan's devices;
nodes of different kinds become parts of one job (Slurm: hetjob, Kubernetes: replicated jobs, Ray: bundles). Say
--partition, --constraint and --node-selector once for all nodes, or once for each group of the plan's cluster.
slurm and kubernetes submit with sbatch and kubectl; torchrun only prints its commands, one per node.
With --output, a job that is preempted, runs out of time or fails goes on from its last checkpoint.
Exit codes: 0 submitted, trained or printed; 1 not taken, or the run failed; 2 bad input; 3 stopped early.
"""
# Options that only some destinations have.
_OF = {
    "address": ("torchrun", "ray"),
    "account": ("slurm",),
    "partition": ("slurm",),
    "constraint": ("slurm",),
    "time": ("slurm",),
    "image": ("kubernetes",),
    "mount": ("kubernetes",),
    "node_selector": ("kubernetes",),
    "kind": ("kubernetes",),
}


@click.command("launch", epilog=EPILOG)
@click.argument("plan", type=click.Path())
@click.option("--on", type=click.Choice(PLACES), required=True, help="Where to train.")
@training_options
@click.option("--dry-run", is_flag=True, help="Print the job; submit and start nothing.")
@click.option("--write", metavar="FILE", type=click.Path(), help="Write the job there, for you to submit.")
@click.option("--name", default="", help="Of the job (default: train-MODEL).")
@click.option("--address", metavar="HOST[:PORT]", help="torchrun: the first node. ray: the cluster (default: near).")
@click.option("--account", help="slurm: who pays.")
@click.option("--partition", multiple=True, help="slurm: partition, for all nodes or for each group.")
@click.option("--constraint", multiple=True, help="slurm: features of nodes, for all or for each group.")
@click.option("--time", metavar="[D-]HH:MM:SS", help="slurm: limit of one start; the job goes on in the next.")
@click.option("--image", help="kubernetes: image with meshwright[run].")
@click.option("--mount", metavar="CLAIM:/PATH", multiple=True, help="kubernetes: volume that all pods share.")
@click.option("--node-selector", metavar="KEY=VALUE", multiple=True, help="kubernetes: nodes, for all or each group.")
@click.option("--kind", type=click.Choice(["jobset", "pytorchjob"]), help="kubernetes: form of job (default jobset).")
@as_json
def command(plan: str, on: str, dry_run: bool, write: str | None, name: str, json_: bool, **options: Any) -> None:
    """Start a plan on this machine, under torchrun, on Slurm, on Kubernetes or on Ray.

    PLAN is the file of a plan with its job, as `meshwright plan -o` writes it. The other options are those of train.
    """
    from meshwright.launchers.launch import Where, requested

    given = {option: options.pop(option) for option in _OF}
    for option, value in given.items():
        if value and on not in _OF[option]:
            raise InputError(f"is for {' and '.join(_OF[option])}, not for {on}", field=f"--{option.replace('_', '-')}")
    if dry_run and write:
        raise InputError("prints, and writes nothing", field="--dry-run", valid="without --write")
    where = Where(on, **{option: value for option, value in given.items() if value})  # type: ignore[arg-type]
    if not os.path.isfile(plan):
        load_plan(plan, {})  # reports errors in the plan, if it is none at all
        raise InputError("is no file, and every process reads it", field="PLAN", valid="a plan.json")
    document, _ = load_plan(plan, {})
    request, promised = requested(document, plan, run_of(options), where, name)
    if dry_run or write or on == "torchrun":
        _print(request, where, write, json_=json_)
    elif on in ("local", "ray"):
        _train(request, promised, where, json_=json_)
    else:
        _submit(request, where, json_=json_)


def _print(request: Request, where: Where, write: str | None, *, json_: bool) -> None:
    from meshwright.base.files import writable, write_text
    from meshwright.launchers.launch import facts, written

    text = written(request, where)
    if write:
        writable("--write", write)
        _make_log_folder(request, where)
        write_text(write, text)
    if json_:
        print_json(facts(request, where) | {"text": text, "file": write or "", "submitted": ""})
    elif write:
        tool = {"slurm": f"sbatch {write}", "kubernetes": f"kubectl apply -f {write}"}.get(where.on)
        click.echo(f"written to {write}" + (f"; submit it with: {tool}" if tool else ""))
    else:
        click.echo(text, nl=False)


def _submit(request: Request, where: Where, *, json_: bool) -> None:
    from meshwright.launchers.launch import facts, submit, written

    text = written(request, where)
    _make_log_folder(request, where)
    said = submit(where.on, text)
    if json_:
        print_json(facts(request, where) | {"text": text, "file": "", "submitted": said})
        return
    for line in request.lines:
        click.echo(line)
    click.echo(f"submitted: {said}")
    if where.on == "slurm":
        from meshwright.launchers.slurm import log_folder

        click.echo(f"logs in {log_folder(request)}; squeue --job={said.split(';')[0]} shows it")


def _make_log_folder(request: Request, where: Where) -> None:
    """Create the log folder: Slurm opens its logs before the job runs."""
    if where.on != "slurm":
        return
    from meshwright.launchers.slurm import log_folder

    try:
        os.makedirs(log_folder(request), exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be made: {error.strerror}", file=log_folder(request), field="--output") from None


def _train(request: Request, promised: Estimate, where: Where, *, json_: bool) -> None:
    from meshwright.cli.running.train import print_step, start
    from meshwright.cli.running.training import Screen, say_plan

    if where.on == "local":
        start(request.job, request.plan, request.run, json_=json_)
        return
    from meshwright.launchers.ray import driver

    if json_:
        stopped = driver.train(request, promised, print_step, address=where.address)
    else:
        say_plan(console(), request.job, request.plan, promised)
        with Screen(request.run.steps) as screen:
            stopped = driver.train(request, promised, screen, address=where.address)
    if stopped:
        sys.exit(STOPPED)
