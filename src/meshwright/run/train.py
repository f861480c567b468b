"""The front door of training: what can be known to be wrong is said here, before any process starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.base.tables import convert
from meshwright.cost.estimate import MEMORY_MARGIN, Estimate, estimate
from meshwright.cost.memory.device_memory import fits
from meshwright.errors import InputError
from meshwright.models import Model
from meshwright.plans import Job, Plan
from meshwright.run.folder.checks import has_checkpoints, refuse_used, writable
from meshwright.run.folder.lock import refuse_if_held
from meshwright.run.options import Training
from meshwright.run.parallel.refusals import refuse, refuse_balance
from meshwright.run.processes.launch import Work, joined_from_outside, launch

Event = dict[str, Any]


def plan_to_run(job: Job) -> Plan:
    """The best plan that the runtime can run, with gradients as they are: who wants them compressed says so in a plan."""
    from meshwright.search import planner

    return planner.plan(job, forbid=("compression",)).plan


def check(job: Job, plan: Plan, run: Training, *, here: bool = True) -> Estimate:
    """Everything that does not need the devices; returns what the plan promises.

    `here`: the run's data and folders are those of this machine, and can be looked at.
    """
    run.check()
    refuse(plan)
    refuse_balance(plan, run.balance)
    hidden = int(job.model.layers[0].width_out)
    if run.lora > hidden:
        raise InputError(f"is {run.lora}", field="--lora", valid=f"1 to the model's width, {hidden}; 0: no adapters")
    if job.seq_len < 2:
        raise InputError("a sample of one token has no next one to learn", field="--seq", valid="2 or more")
    if joined_from_outside() and int(os.environ["WORLD_SIZE"]) != plan.devices:
        said = os.environ["WORLD_SIZE"]
        problem = f"the plan runs on {plan.devices} devices, the launcher started {said} processes"
        raise InputError(problem, field="--plan", valid=f"a plan for {said} devices, or {plan.devices} processes")
    if here:
        _check_data(job, run)
        _check_folders(run)
    promised = estimate(job, plan)
    beyond = [memory for memory in promised.memory if memory.total * (1 - MEMORY_MARGIN) > memory.capacity]
    if beyond:
        fits(beyond)  # what is short by more than the estimate may err would only fail later, and less clearly
    return promised


def _check_data(job: Job, run: Training) -> None:
    held_out = run.held_out(job.global_batch)
    facts = {"vocab": vocabulary(job.model), "seq_len": job.seq_len, "global_batch": job.global_batch}
    for split in ("train", "evaluation") if run.evaluate_every else ("train",):
        _opened(run, held_out, split, facts)


def _check_folders(run: Training) -> None:
    """Check the folders that a run reads from and writes to."""
    for option, path in (("--export", run.export), ("--profile", run.profile)):
        if path and Path(path).exists() and not Path(path).is_dir():
            raise InputError("is a file", file=path, field=option, valid="a folder, or a new one")
    if run.export and any(Path(run.export).glob("*.safetensors")):
        raise InputError("holds a model already", file=run.export, field="--export", valid="another folder")
    if run.init_from and not Path(run.init_from).is_dir():
        raise InputError("no such folder", file=run.init_from, field="--init-from")
    if run.output and Path(run.output).exists() and not Path(run.output).is_dir():
        raise InputError("is a file", file=run.output, field="--output", valid="a folder, or a new one")
    if run.resume and not run.auto_resume and not has_checkpoints(run):
        raise InputError("holds no whole checkpoint", file=run.output, field="--resume")
    if run.output and int(os.environ.get("RANK", "0")) == 0:  # another rank may find rank 0 at work already
        refuse_if_held(run.output)
    refuse_used(run)


def _opened(run: Training, held_out: int, split: str, facts: dict[str, int]) -> None:
    """Check that there is enough data; errors name the user's file and option, not those of its prepared form."""
    from meshwright.run.data import open_data

    try:
        open_data(run.data, seed=run.seed, held_out=held_out, split=split, **facts)  # type: ignore[arg-type]
    except InputError as error:
        if error.field == "global_batch":
            error.file, error.field = run.data, "--batch"
        raise


def start(plan: Plan, run: Training, promised: Estimate, tell: Callable[[Event], None], *, ours: bool = False) -> int:
    """Train until the run has ended; raises what made it fail. Return the signal that stopped it early, or 0.

    `ours`: this process is no program of the user's; a launcher's rank may end it.
    """
    make_folders(run)
    return launch(Work(plan.to_table(), run, promised.step_seconds, promised.mfu, plan.devices), tell, ours=ours)


def make_folders(run: Training) -> None:
    """Make what a run writes to before anything is trained; nothing is written there before it holds its lock."""
    if run.output and int(os.environ.get("RANK", "0")) == 0:
        _made(run.output, "--output")
    for option, path in (("--export", run.export), ("--profile", run.profile)):
        if path:
            _made(path, option)


def _made(folder: str, option: str) -> None:
    """Made before anything is trained: what cannot be written to is said now."""
    with writable(folder, option):
        Path(folder).mkdir(parents=True, exist_ok=True)


def train(
    plan: Plan, data: str = "synthetic", *, steps: int, tell: Callable[[Event], None] | None = None, **options: Any
) -> list[Event]:
    """Train under a plan on this machine, or as one of the processes that a launcher started; return its events.

    A signal that stopped the run early is passed on to the program once the run has saved.
    """
    run = convert({"steps": steps, "data": data, **options}, Training)
    if not isinstance(plan, Plan):
        raise InputError(f"is {type(plan).__name__}, expected a Plan", field="plan", valid="Plan.load(path)")
    job = plan.resolve()
    found: list[Event] = []

    def both(event: Event) -> None:
        found.append(event)
        if tell:
            tell(event)

    stopped = start(plan, run, check(job, plan, run), both)
    if stopped:
        signal.raise_signal(stopped)
    return found


def vocabulary(model: Model) -> int:
    """Tokens that a model knows."""
    table = model.layer("embed").ops[0].weights[0]
    return table.units
