"""One rank of a run: joins the others, trains, and reports why if it cannot."""

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
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshwright.base.processes import state_of
from meshwright.compression.sync import PeerLost
from meshwright.errors import STOPPED, InputError, MeshwrightError, TrainingFailed
from meshwright.plans import Plan
from meshwright.run.loop import Prediction, train
from meshwright.run.memory.host_memory import keep_freed_memory
from meshwright.run.processes.launch import Work, quiet_exit
from meshwright.run.processes.threads import share_cores
from meshwright.run.supervision.heartbeat import Cause
from meshwright.run.supervision.stop_signals import AT_ONCE, SIGNALS, StopSignals
from meshwright.run.supervision.watchdog import JOINING, Member, Watchdog, limit_of
from meshwright.run.torch_private import grow_segments, limit_collectives

_LATER = 30.0  # seconds after the watchdog's limit until PyTorch's own: the watchdog's message is better
Tell = Callable[[dict[str, Any]], None]
Message = tuple[str, int, dict[str, Any]]  # kind, rank, facts: a message from a rank to its launcher
# PyTorch's messages when another process has gone: a consequence, not a reason.
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


def work_alone(work: Work, tell: Tell) -> int:
    """Train a world of one process, in this one; return the signal that stopped it early, or 0."""
    joined, threads = dist.is_initialized(), torch.get_num_threads()
    with StopSignals(interrupts=True) as signals:
        watchdog = Watchdog(Member(), signals, lambda cause: None)  # no rank waits for another, so nothing has a limit
        try:
            return _train(work, _device(0, 1), tell, watchdog)
        except KeyboardInterrupt:
            raise TrainingFailed(AT_ONCE) from None
        except Exception as error:
            raise described(error, work) from None
        finally:
            watchdog.close()
            torch.set_num_threads(threads)  # the process belongs to the caller
            if dist.is_initialized() and not joined:
                dist.destroy_process_group()


def work_together(work: Work, rank: int, local_rank: int, tell: Tell, *, ours: bool) -> int:
    """Train as one of the ranks that a launcher has started; one of them reports what is wrong.

    Return the signal that stopped the run early, or 0. `ours`: the process is not a program of the user's, and ends
    here.
    """
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    member = Member(rank, work.world, launcher=os.getppid() if torchrun else 0, ends_at_once=True)

    def leave(cause: Cause) -> None:
        if cause.mine:
            print(f"error: {cause.text}", file=sys.stderr, flush=True)  # noqa: T201
        quiet_exit(cause.code)

    return _attempt(work, member, local_rank, tell if rank == 0 else lambda _: None, leave, ours=ours)


def work_locally(work: Work, rank: int, messages: Any, launcher: int) -> None:
    """Train as one of the ranks that `launch` starts; `launcher` is its process, which keeps the store."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # they are blocked in the server it was forked from
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": work.world, "LOCAL_WORLD_SIZE": work.world}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(work.port), TORCHELASTIC_USE_AGENT_STORE="True")

    def finish(code: int) -> None:
        # A stopped launcher reads nothing, and its pipe may be full.
        flush = threading.Thread(target=lambda: (messages.close(), messages.join_thread()), daemon=True)
        flush.start()
        flush.join(timeout=2.0)
        quiet_exit(code)

    finish(work_for(work, Sender(rank, messages.put, finish, launcher), ours=True))


@dataclass(frozen=True)
class Sender:
    """Connection of one rank to the process that started it."""

    rank: int
    put: Callable[[Message], None]
    finish: Callable[[int], None]  # ends this process, from any thread
    launcher: int = 0  # process number on this machine; 0: it is elsewhere
    reads: Callable[[], bool] = lambda: True

    def send(self, kind: str, facts: dict[str, Any]) -> None:
        """Send to the launcher; print a fatal error if there is none."""
        if not self.launcher or state_of(self.launcher) not in ("", "Z", "T"):
            self.put((kind, self.rank, facts))
        elif kind != "event":
            print(facts["text"], file=sys.stderr, flush=True)  # noqa: T201

    def fail(self, cause: Cause) -> None:
        """Send why the run ends, unless another rank does."""
        if cause.mine:
            error = cause.error or TrainingFailed(cause.text)
            self.send("failure", {"error": error, "text": f"error: {error}", "time": time.time()})


def work_for(work: Work, sender: Sender, *, ours: bool) -> int:
    """Train for a launcher that reads messages; return the exit code. `ours`: the process ends with the run, here."""
    rank, local_rank = sender.rank, int(os.environ["LOCAL_RANK"])
    member = Member(
        rank, work.world, launcher=sender.launcher, reads=sender.reads,
        report=lambda text, number: sender.send("stopping", {"text": text, "signal": number}),
    )  # fmt: skip

    def leave(cause: Cause) -> None:
        sender.fail(cause)
        sender.finish(cause.code)

    stopped = _attempt(work, member, local_rank, lambda event: sender.send("event", event), leave, ours=ours)
    return STOPPED if stopped else 0


def _attempt(
    work: Work, member: Member, local_rank: int, tell: Tell, leave: Callable[[Cause], None], *, ours: bool
) -> int:
    """Join the ranks that the environment names, and train; return the signal that stopped the run early, or 0.

    `leave` ends the process: when the run fails, also from the watchdog's thread, and when it was stopped and is
    `ours`.
    """
    device = _device(local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    member = replace(member, limit=_limit(work, device))
    with StopSignals() as signals:
        watchdog = Watchdog(member, signals, leave)
        try:
            watchdog.phase("joining the other ranks", JOINING)
            _join(device, member.limit)
            stopped = _train(work, device, tell, watchdog)
            if stopped:
                watchdog.all_saved()
        except BaseException as error:
            found = described(error, work)
            if not _consequence(error):
                cause = Cause(str(found), found.exit_code, error=found)
                leave(replace(cause, mine=watchdog.failed(cause)))
            leave(watchdog.cause(str(found)))
        if stopped and ours:  # while signals are ignored: what launchers send to the rest must not change the exit code
            leave(Cause("", STOPPED))
        dist.destroy_process_group()
        watchdog.close()
        return stopped


def store_of_ranks() -> Any:
    """Return the store through which ranks of this machine meet, kept by the process that starts them."""
    return dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def enough_devices(world: int) -> None:
    """Raise if there are fewer devices than ranks: NCCL needs one each, and would fail later and less clearly."""
    count = torch.cuda.device_count()
    if 0 < count < world:
        problem = f"the plan runs on {world} devices, this machine shows {count} of CUDA's"
        valid = f"a plan for at most {count}, or CUDA_VISIBLE_DEVICES= (empty) to train in processes of the CPU"
        raise InputError(problem, field="--plan", valid=valid)


def _join(device: str, limit: float) -> None:
    """Join the other ranks. Objects and checkpoints are sent from host memory."""
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=JOINING))
    limit_collectives(timedelta(seconds=limit + _LATER))


def _limit(work: Work, device: str) -> float:
    """Return how long a rank may let others wait; the prediction does not count for a plan made for other devices."""
    cluster = Plan.of(work.plan).resolve().cluster
    cpu = all(kind.name == "cpu" for kind in cluster.kinds(range(cluster.devices)))
    return limit_of(work.run.wait, work.step_seconds, here=cpu == (device == "cpu"))


def _train(work: Work, device: str, tell: Tell, watchdog: Watchdog) -> int:
    plan = Plan.of(work.plan)
    return train(plan.resolve(), plan, work.run, Prediction(work.step_seconds, work.mfu), tell, device, watchdog)


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
    """Return the first error: PyTorch wraps errors inside a pipeline in others."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _consequence(error: BaseException) -> bool:
    root = _root(error)
    if isinstance(root, PeerLost):
        return True
    return not isinstance(error, MeshwrightError) and any(text in str(root) for text in _LOST)


def described(error: BaseException, work: Work) -> MeshwrightError:
    """Return the error as a user should read it: an input error as it is, a shortage with advice, a bug in full."""
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
