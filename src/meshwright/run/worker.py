"""One process of a run: joins the others, trains, and says why if it cannot."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright.compress.sync import PeerLost
from meshwright.errors import InputError, MeshwrightError
from meshwright.plan import Plan
from meshwright.run.host_memory import keep_freed_memory
from meshwright.run.launch import TrainingFailed, Work, quiet_exit
from meshwright.run.loop import Prediction, train
from meshwright.run.threads import share_cores
from meshwright.run.torch_private import default_store, grow_segments

_WAIT = timedelta(seconds=600)  # for a peer; a lost one is noticed at once, a stuck one after this
Tell = Callable[[dict[str, Any]], None]
Failure = dict[str, Any]  # error, consequence (of another process that failed), time
# What PyTorch says when another process has gone: a consequence, not a reason.
_LOST = (
    "Connection closed by peer",
    "Connection reset",
    "Read error",
    "Write error",
    "Broken pipe",
    "Timed out",
    "NCCL",
    "recv failed",
    "Socket",
)


def work_alone(work: Work, tell: Tell) -> None:
    """A world of one process, in this one."""
    joined, threads = dist.is_initialized(), torch.get_num_threads()
    try:
        _train(work, _device(0, 1), tell)
    except Exception as error:
        raise told(error, work) from None
    finally:
        torch.set_num_threads(threads)  # the process is the caller's
        if dist.is_initialized() and not joined:
            dist.destroy_process_group()


def work_together(work: Work, rank: int, local_rank: int, tell: Tell) -> None:
    """One of the processes that a launcher has started; one of them says what is wrong."""
    device = _device(local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    _join(device)
    try:
        _train(work, device, tell if rank == 0 else lambda _: None)
        dist.destroy_process_group()
    except Exception as error:
        found = told(error, work)
        # The first that fails for a reason of its own says so.
        if not _consequence(error) and default_store().add("meshwright/failed", 1) == 1:
            print(f"error: {found}", file=sys.stderr)  # noqa: T201
        quiet_exit(getattr(found, "exit_code", 1))


def work_locally(work: Work, rank: int, events: Any, launcher: Any) -> None:
    """One of the processes that `launch` starts; `launcher` is a pipe that closes with the one who did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(work.port), RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(work.world), LOCAL_WORLD_SIZE=str(work.world))
    failure = attempt(work, rank, work.world, lambda event: events.put(("event", rank, event)))
    if failure:
        events.put(("failure", rank, failure))
    events.close()
    events.join_thread()
    quiet_exit(1 if failure else 0)


def attempt(work: Work, local_rank: int, neighbours: int, tell: Tell) -> Failure | None:
    """Join the others that the environment names, and train; what went wrong, if anything did.

    `neighbours`: processes on this node, which share its cores.
    """
    device = _device(local_rank, neighbours)
    try:
        _join(device)
        _train(work, device, tell)
        dist.destroy_process_group()
    except BaseException as error:
        return {"error": told(error, work), "consequence": _consequence(error), "time": time.time()}
    return None


def enough_devices(world: int) -> None:
    """NCCL has one process per device: fewer would only fail later, and less clearly."""
    count = torch.cuda.device_count()
    if 0 < count < world:
        problem = f"the plan runs on {world} devices, this machine shows {count} of CUDA's"
        valid = f"a plan for at most {count}, or CUDA_VISIBLE_DEVICES= (empty) to train in processes of the CPU"
        raise InputError(problem, field="--plan", valid=valid)


def _join(device: str) -> None:
    """Objects, and checkpoints, travel from host memory."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo", timeout=_WAIT)


def _end_with(launcher: Any) -> None:
    """A process whose launcher was killed must not train on for nobody."""
    with suppress(EOFError, OSError):
        launcher.recv()
    quiet_exit(1)


def _train(work: Work, device: str, tell: Tell) -> None:
    plan = Plan.of(work.plan)
    train(plan.resolve(), plan, work.run, Prediction(work.step_seconds, work.mfu), tell, device)


def _device(local_rank: int, neighbours: int) -> str:
    if torch.cuda.is_available():
        device = f"cuda:{local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
        grow_segments()
        return device
    keep_freed_memory()
    share_cores(neighbours)
    return "cpu"


def _root(error: BaseException) -> BaseException:
    """What went wrong first: PyTorch wraps errors inside a pipeline in others."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _consequence(error: BaseException) -> bool:
    root = _root(error)
    if isinstance(root, PeerLost):
        return True
    return not isinstance(error, MeshwrightError) and any(text in str(root) for text in _LOST)


def told(error: BaseException, work: Work) -> Exception:
    """The error as a user should read it: a mistake as it is, a shortage with what would help, a bug in full."""
    root = _root(error)
    for each in (error, root):
        if isinstance(each, MeshwrightError):
            return each
    text = str(root).strip()
    if (
        isinstance(root, torch.OutOfMemoryError | MemoryError)
        or "not enough memory" in text
        or "can't allocate" in text
    ):
        where = f"rank {os.environ.get('RANK', '0')}"
        help_ = (
            "a smaller micro_batch, recompute=full, a higher zero level, or more devices (meshwright plan finds them)"
        )
        return TrainingFailed(f"{where}: out of memory: {text.splitlines()[0][:200]}; try {help_}")
    if isinstance(root, OSError) and root.errno in (errno.ENOSPC, errno.EDQUOT):
        where = root.filename or work.run.output
        return TrainingFailed(f"{where}: the disk is full; the last whole checkpoint is kept")
    if isinstance(root, OSError) and root.filename:
        return TrainingFailed(f"{root.filename}: {root.strerror}")
    if not _consequence(root):
        with suppress(Exception):
            traceback.print_exception(error)
    return TrainingFailed(f"{type(root).__name__}: {text[:500]}")
