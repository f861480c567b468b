"""The training loop of one process, read from top to bottom."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import InputError, TrainingFailed
from meshwright.plans import Job, Plan
from meshwright.run.data import Source, open_data
from meshwright.run.data.prefetch import Feed
from meshwright.run.folder.checkpoint.checkpoint import Checkpoints, Found
from meshwright.run.folder.checkpoint.files import sweep
from meshwright.run.folder.checkpoint.gather import write_whole
from meshwright.run.folder.checkpoint.huggingface import values_from
from meshwright.run.folder.events import Events
from meshwright.run.folder.hold import Hold, hold_folder
from meshwright.run.memory.host_memory import Peaks
from meshwright.run.mesh.mesh import local
from meshwright.run.models.dynamic_precision import Dynamic
from meshwright.run.models.numerics import numerics
from meshwright.run.optimizers.choose import optimizer_for, updates_of
from meshwright.run.optimizers.loss_spike import LossSpikeGuard
from meshwright.run.options import Training
from meshwright.run.parallel.apply import Values, apply
from meshwright.run.parallel.parallel_model import Parallel
from meshwright.run.parallel.stage import MicroBatch
from meshwright.run.precision.loss_scale import LossScale
from meshwright.run.supervision.watchdog import SAVING, Watchdog

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES["fp8"] = torch.bfloat16  # of all but the products of blocks
EVENTS = 1  # version of events.jsonl: grows when a fact changes its name or meaning
_BAD_STEPS = 20  # in a row, whose gradients are no numbers: training has failed
Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Prediction:
    """Prediction of the plan for one step."""

    step_seconds: float
    mfu: float

    def mfu_at(self, seconds: float) -> float:
        """The model's own FLOPs over what the devices could do in a measured step."""
        return self.mfu * self.step_seconds / seconds


@dataclass
class Loop:
    """State of the training loop on one rank."""

    job: Job
    run: Training
    part: Parallel
    optimizer: Any
    scale: LossScale
    guard: LossSpikeGuard
    dynamic: Dynamic | None = None
    bad: int = 0  # steps in a row whose gradients were no numbers


def train(
    job: Job, plan: Plan, run: Training, prediction: Prediction, tell: Tell, device: str, watchdog: Watchdog
) -> int:
    """Train; every rank of the plan calls this. Return the signal that stopped the run early, or 0.

    `tell` gets every event of the first rank.
    """
    watchdog.phase("taking the run's folder", SAVING)
    with hold_folder(run, plan, sweep) as hold:
        return _train(job, plan, run, prediction, tell, device, watchdog, hold)


def _train(
    job: Job, plan: Plan, run: Training, prediction: Prediction, tell: Tell, device: str, watchdog: Watchdog, hold: Hold
) -> int:
    rank = dist.get_rank() if dist.is_initialized() else 0
    events = Events(run.output, rank)

    def say(event: str, **facts: Any) -> None:
        found = events.say(event, **facts)
        if rank == 0:
            tell(found)

    watchdog.phase("opening the data")
    data = _data(job, run, "train")
    held = _data(job, run, "evaluation") if run.evaluate_every else None
    peaks = Peaks(device)
    watchdog.phase("building the model", SAVING)
    loop = begin(job, plan, run, device)
    watchdog.phase("reading the checkpoint", SAVING)
    checkpoints = Checkpoints(Path(run.output) / "checkpoints", run.keep, hold) if run.output else None
    start = _resume(loop, checkpoints, say) if (run.resume or run.auto_resume) and checkpoints else 0
    say(
        "start",
        version=EVENTS,
        step=start,
        steps=run.steps,
        devices=plan.devices,
        parameters=job.model.parameters,
        trained=loop.part.trained(),
    )
    stopped, step = False, start
    with (
        peaks,
        Feed(data, loop.part, range(start, run.steps), device) as feed,
        _trace(run, rank) as traced,
        closing(checkpoints) if checkpoints else nullcontext(),
    ):
        for index, batches in feed:
            step = index + 1
            watchdog.step(step)
            begun = time.perf_counter()
            if loop.dynamic:
                loop.dynamic.before(index)
            facts = advance(loop, batches, index, stop=watchdog.asked() > 0 or hold.lost())
            seconds = time.perf_counter() - begun
            stopped = facts.pop("stop") and step < run.steps
            say("step", step=step, **facts, **_speed(job, prediction, seconds), **peaks.facts())
            for move in loop.dynamic.after(index, healthy="skipped" not in facts) if loop.dynamic else ():
                say("precision", step=step, **move)
            traced()
            if held and step % run.evaluate_every == 0:
                say("evaluation", step=step, loss=_evaluate(loop, held, device, watchdog))
            if checkpoints and (stopped or step == run.steps or _due(step, run.save_every)):
                watchdog.phase(f"saving step {step}", SAVING)
                checkpoints.save(step, loop.part, loop.optimizer, _kept(loop))
                say("checkpoint", step=step)
            if stopped:
                break
            watchdog.phase(f"reading the samples of step {step + 1}")
        if checkpoints:
            watchdog.phase(f"saving step {step}", SAVING)
            checkpoints.wait()
        if run.export and not stopped:
            watchdog.phase("exporting the model", SAVING)
            write_whole(job.model, loop.part, run.export)
    say("stopped" if stopped else "end", step=step)
    events.close()
    return (watchdog.asked() or signal.SIGTERM) if stopped else 0


def _data(job: Job, run: Training, split: Any) -> Source:
    held_out = run.held_out(job.global_batch)
    return open_data(
        run.data, vocab=numerics(job.model).vocab, seq_len=job.seq_len, global_batch=job.global_batch, seed=run.seed,
        held_out=held_out, split=split,
    )  # fmt: skip


def begin(job: Job, plan: Plan, run: Training, device: str, values: Values | None = None) -> Loop:
    """The model in its first state, or with the given `values`, and all that a step needs."""
    dtype = DTYPES[job.precision]
    torch.backends.cuda.matmul.allow_tf32 = job.precision == "tf32"
    values = values_from(job.model, run.init_from, run.seed) if run.init_from else values
    part = apply(
        job.model, plan, seed=run.seed, device=device, dtype=dtype, values=values, lora=run.lora, balance=run.balance
    )
    optimizer = optimizer_for(job.optimizer, part, run.lr, run.weight_decay)
    loop = Loop(job, run, part, optimizer, LossScale.of(dtype), LossSpikeGuard())
    for product in part.products().values() if job.precision == "fp8" else ():
        product.computed_in = "fp8"
    if run.dynamic:
        loop.dynamic = Dynamic.of(part.products(), job.precision, device)
    return loop


def advance(loop: Loop, batches: Sequence[MicroBatch], step: int, *, stop: bool) -> dict[str, Any]:
    """Forward, backward, clip, update."""
    rate = loop.run.rate_at(step)
    for group in loop.optimizer.param_groups:
        group["lr"] = rate
    loop.optimizer.zero_grad(set_to_none=True)
    divisor = loop.job.global_batch * loop.job.seq_len / loop.scale.value
    found = loop.part.step(batches, divisor, votes=float(stop))
    mean = divisor / max(found.tokens, 1.0)  # losses were divided by all tokens: the mean is over those with a next one
    norm = float(loop.part.copies.norm()) * mean
    facts = {"loss": found.loss * mean, "grad_norm": norm, "lr": rate, "stop": found.votes > 0}
    good = math.isfinite(norm)
    if loop.job.precision == "fp16":
        loop.scale.after(overflow=not good)
    loop.bad = 0 if good else loop.bad + 1
    if loop.bad >= _BAD_STEPS:
        problem = f"gradients have been no finite numbers for {loop.bad} steps, up to step {step + 1}"
        raise TrainingFailed(f"{problem}: try a smaller --lr, or --precision bf16 or fp32")
    if not good or (loop.run.guard and not loop.guard.judge(facts["loss"])):
        loop.part.correct_routers(speed=0.0)
        return facts | {"skipped": "spike" if good else True}
    factor = mean * (min(1.0, loop.run.clip / (norm + 1e-6)) if loop.run.clip else 1.0)
    grads = [local(weight.grad) for weight in loop.part.parameters() if weight.grad is not None]
    if grads:  # a stage may have nothing that is trained
        torch._foreach_mul_(grads, factor)
    loop.optimizer.step()
    loop.part.correct_routers()
    return facts


def _evaluate(loop: Loop, held: Source, device: str, watchdog: Watchdog) -> float:
    """Return the mean loss over batches that are not trained on."""
    divisor = float(loop.job.global_batch * loop.job.seq_len)
    total = tokens = 0.0
    with Feed(held, loop.part, range(loop.run.evaluate_batches), device) as feed:
        for index, batches in feed:
            watchdog.phase(f"evaluation batch {index + 1}")
            found = loop.part.evaluate(batches, divisor)
            total, tokens = total + found.loss * divisor, tokens + found.tokens
    return total / max(tokens, 1.0)


def _speed(job: Job, prediction: Prediction, seconds: float) -> dict[str, Any]:
    return {
        "step_time_s": seconds,
        "predicted_step_time_s": prediction.step_seconds,
        "mfu": prediction.mfu_at(seconds),
        "tokens_per_second": job.tokens_per_step / seconds,
    }


def _resume(loop: Loop, checkpoints: Checkpoints, say: Callable[..., None]) -> int:
    found, problems = checkpoints.newest()
    for problem in problems:
        say("damaged", problem=problem)
    if found is None:
        wrong = "; ".join(["holds no whole checkpoint", *problems])
        if loop.run.auto_resume:
            if problems:
                _begin_anew(checkpoints.folder, wrong, say)
            return 0
        raise InputError(wrong, file=str(checkpoints.folder), field="--resume")
    _same_run(found, _kept(loop)["run"])
    if found.step >= loop.run.steps and not loop.run.auto_resume:
        problem = f"is {loop.run.steps} in all, the run is at step {found.step} already"
        raise InputError(problem, file=str(found.path), field="--steps", valid=f"more than {found.step}")
    if not checkpoints.load(found, loop.part, loop.optimizer):
        say("changed", name="compression", before="what was unsaid of another plan's gradients", now="left out")
    _restore(loop, found)
    now = _kept(loop)["job"]
    for name, before in found.facts.get("job", {}).items():
        if now[name] != before:
            say("changed", name=name, before=before, now=now[name])
    say("resumed", step=found.step, checkpoint=str(found.path))
    return found.step


def _begin_anew(folder: Path, wrong: str, say: Callable[..., None]) -> None:
    """Say that a run that could have gone on begins at its first step."""
    say("anew", step=0, problem=wrong)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{folder}: {wrong}; the run begins at step 1", file=sys.stderr)  # noqa: T201


def _restore(loop: Loop, found: Found) -> None:
    """Put back what a checkpoint holds beside weights and the optimizer's states."""
    if found.facts.get("job", {}).get("precision") == loop.job.precision:
        loop.scale = LossScale(**found.facts["scale"])
    loop.guard = LossSpikeGuard(**found.facts.get("guard", {}))
    if loop.dynamic:
        loop.dynamic.restore(found.facts.get("products", {}))


def _same_run(found: Found, now: dict[str, Any]) -> None:
    """Refuse to resume with another model, adapter rank or optimizer than the checkpoint has."""
    options = {"parameters": "MODEL", "lora": "--lora", "optimizer": "--optimizer"}
    for name, before in found.facts.get("run", {}).items():
        if now[name] != before and name != "model":  # the same model may have several names
            model = found.facts["run"]["model"]
            problem = f"is of a run of {model} with {name} {before}, not {now[name]}"
            valid = model if name == "parameters" else str(before)
            raise InputError(problem, file=str(found.path), field=options[name], valid=valid)


def _kept(loop: Loop) -> dict[str, Any]:
    """Return what a checkpoint holds beside weights and optimizer states."""
    products = {"products": loop.dynamic.state()} if loop.dynamic else {}
    job: dict[str, Any] = {"global_batch": loop.job.global_batch, "seq_len": loop.job.seq_len, "seed": loop.run.seed}
    job |= {"data": loop.run.data, "held_out": loop.run.held_out(loop.job.global_batch)}
    job |= {"precision": loop.job.precision, "balance": loop.run.balance}
    run = {"model": loop.job.model.name, "parameters": loop.job.model.parameters}
    run |= {"lora": loop.run.lora, "optimizer": loop.job.optimizer}
    updates = updates_of(loop.optimizer)
    return {
        "run": run,
        "job": job,
        "updates": updates,
        "scale": asdict(loop.scale),
        "guard": asdict(loop.guard),
        **products,
    }


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _trace(run: Training, rank: int) -> Iterator[Callable[[], None]]:
    """A trace of steps 3 to 5 by PyTorch's profiler, for `meshwright analyze`: with shapes, which tell bytes and FLOPs."""
    if not run.profile:
        yield lambda: None
        return
    folder = Path(run.profile)
    folder.mkdir(parents=True, exist_ok=True)

    def write(profiler: Any) -> None:
        file = folder / f"rank{rank}.json"
        profiler.export_chrome_trace(str(file))
        half = folder / f"{file.name}.tmp"  # PyTorch writes there, and says nothing if the disk refuses
        if half.exists():
            half.unlink()
            raise TrainingFailed(f"{file}: cannot be written whole; is the disk full?")

    schedule = torch.profiler.schedule(skip_first=1, wait=0, warmup=1, active=3, repeat=1)
    with torch.profiler.profile(
        schedule=schedule, on_trace_ready=write, record_shapes=True, profile_memory=torch.cuda.is_available()
    ) as profiler:
        yield profiler.step
