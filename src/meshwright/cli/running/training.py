"""Job and plan that the options of `train` describe, and its screen."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from meshwright.base.units import size
from meshwright.cli.common import load_plan, notes_on
from meshwright.clusters import Cluster
from meshwright.errors import InputError, MeshwrightError
from meshwright.models import Model
from meshwright.plans import Job, Plan, parse_short

if TYPE_CHECKING:
    from rich.console import Console

    from meshwright.cost.estimate import Estimate

_BATCH = 8  # samples per step by default: enough for small plans


def first() -> bool:
    """Return True if this process prints for all: the only one, or the first that a launcher has started."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def said_once() -> Iterator[None]:
    """Print an error that every rank finds on the first rank only; all end with its exit code."""
    try:
        yield
    except MeshwrightError as error:
        if first():
            raise
        sys.exit(error.exit_code)


def job_and_plan(model: str | None, plan: str | None, cluster: str | None, given: dict[str, Any]) -> tuple[Job, Plan]:
    """Return the job and plan: from a plan with its job, a model and a short plan, or a model whose plan is searched."""
    if plan == "":
        raise InputError("is empty", field="--plan", valid="a plan.json, or degrees such as tp=2,pp=2")
    short = parse_short(plan) if plan and "=" in plan and not os.path.exists(plan) else None
    if plan and short is None:
        if not os.path.exists(plan) and plan != "-":
            raise InputError(
                "no such file", file=plan, field="--plan", valid="a plan.json, or degrees such as tp=2,pp=2"
            )
        options = {"model": model, "cluster": cluster, **given}
        try:
            found, job = load_plan(plan, options)
        except InputError as error:
            error.field = "MODEL" if error.field == "--model" else error.field
            raise
        return job, found
    if model is None:
        raise InputError(
            "is needed beside a short plan", field="MODEL", valid="a preset such as tiny-llama, or a config.json"
        )
    world = _world(short)
    where = cluster or f"local:{world}"
    job = _job(model, where, given)
    if short is not None:
        return job, Plan.of(short, job)
    from meshwright.run.train import plan_to_run

    return job, plan_to_run(job)


def _world(short: dict[str, Any] | None) -> int:
    """Return the number of ranks that a short plan needs, or that a launcher has started."""
    if short is not None:
        degrees = [short.get(name, 1) for name in ("dp", "tp", "ulysses", "ring", "pp")]
        if all(isinstance(degree, int) and degree > 0 for degree in degrees):
            return math.prod(degrees)
    return int(os.environ.get("WORLD_SIZE", "1"))


def _job(model: str, cluster: str, given: dict[str, Any]) -> Job:
    try:
        where = Cluster.load(cluster)
    except InputError as error:
        raise error.at(field="--cluster") from None
    try:
        what = Model.load(model)
    except InputError as error:
        raise error.at(field="MODEL") from None
    cpu = all(kind.name == "cpu" for kind in where.kinds(range(where.devices)))
    precision = given["precision"] or ("fp32" if cpu else "bf16")
    try:
        return Job(what, where, given["batch"] or _BATCH, given["seq"] or 0, precision, given["optimizer"] or "adamw")
    except InputError as error:
        error.field = {"global_batch": "--batch", "seq_len": "--seq"}.get(error.field, f"--{error.field}")
        raise


def say_plan(screen: Console, job: Job, plan: Plan, promised: Estimate) -> None:
    """Print the job, the plan and its prediction."""
    pipeline = plan.pipelines[0]
    stages = [f"{len(pipeline.stages)} stages ({pipeline.schedule.name})"] if len(pipeline.stages) > 1 else []
    span = pipeline.stages[0].spans[0]
    usual = {"dp": 1, "tp": 1, "ulysses": 1, "ring": 1, "ep": 1, "etp": 1, "zero": 0, "recompute": "none"}
    chosen = [f"{name}={getattr(span, name)}" for name, default in usual.items() if getattr(span, name) != default]
    ways = ", ".join([*stages, *chosen, _counted(pipeline.micro_batches, "micro-batch", "micro-batches")])
    screen.print(f"model   {job.model.name}, {job.model.parameters / 1e6:,.1f} M parameters, {job.precision}")
    screen.print(f"batch   {job.global_batch} samples of {job.seq_len} tokens")
    screen.print(f"plan    {_counted(plan.devices, 'device', 'devices')}: {ways}")
    promise = f"{promised.step_seconds:.3g} s a step, {size(promised.peak_memory)} at most on a device"
    screen.print(f"expect  {promise}, MFU {promised.mfu:.1%}")
    for note in [*notes_on(plan, job), *_elsewhere(job)]:
        screen.print(f"note    {note}")


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _elsewhere(job: Job) -> list[str]:
    """Return a note if the plan was made for other devices: it trains on those that are here."""
    asked = {kind.name for kind in job.cluster.kinds(range(job.cluster.devices))}
    here = Cluster.load("local")
    if asked == {"cpu"} or {kind.name for kind in here.kinds(range(here.devices))} != {"cpu"}:
        return []
    return [f"the plan is for {', '.join(sorted(asked))}; this machine has none: its processors train, and slowly"]


_LINES = {  # for events that are not steps
    "evaluation": "step {step:>6}  evaluation loss {loss:.4f}",
    "precision": "step {step:>6}  {layer}: {from} -> {to}",
    "resumed": "resumed at step {step} from {checkpoint}",
    "changed": "note: {name} was {before}, is {now}",
    "damaged": "note: {problem}; this checkpoint is not used",
    "stopped": "stopped at step {step}; --resume goes on where there is an --output",
}


class Screen:
    """Output of training: a bar on a terminal, lines elsewhere."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Screen:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.description}", markup=False),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("starting", total=self.steps)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        name = event["event"]
        if name == "step":
            text = _line(event)
            if self._bar:
                self._bar.update(self._task, completed=event["step"], description=text)
            often = max(self.steps // 20, 1)
            if event["step"] % often == 0 or event["step"] in (1, self.steps) or event.get("skipped"):
                self._say(f"step {event['step']:>6}  {text}")
        elif name in _LINES:
            self._say(_LINES[name].format(**event))

    def _say(self, text: str) -> None:
        """Print above the bar if both are on one terminal."""
        if self._bar and sys.stdout.isatty():
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            click.echo(text)
            sys.stdout.flush()


def _line(event: dict[str, Any]) -> str:
    found = (
        f"loss {event['loss']:.4f}  norm {event['grad_norm']:.3g}  {event['step_time_s']:.3g} s "
        f"(expected {event['predicted_step_time_s']:.3g})  {size(event['peak_memory_bytes'])}  MFU {event['mfu']:.1%}"
    )
    why = {True: "  left out: no finite gradients", "spike": "  left out: the loss is far above its level"}
    return found + why.get(event.get("skipped", False), "")
