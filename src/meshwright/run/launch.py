"""Start the processes of a plan on this machine, or join those that a launcher has started.

A run ends with one message: the first process that fails for a reason of its own says why, the others are ended.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import InputError, MeshwrightError
from meshwright.processes import script_left_alone
from meshwright.run.options import Training

STOPPING = "stopping after this step; again: at once"
AT_ONCE = "stopped at once; the last whole checkpoint is kept"
_PATIENCE = 8.0  # seconds that processes get to end by themselves after one has failed, or to say why
_KNOWN = 1.0  # once one has said why
Event = dict[str, Any]


class TrainingFailed(MeshwrightError):
    """A run that started and could not go on."""

    exit_code = 1


@dataclass(frozen=True)
class Work:
    """What every process is told."""

    plan: dict[str, Any]
    run: Training
    step_seconds: float
    mfu: float
    world: int
    port: int = 0


def joined_from_outside() -> bool:
    """Whether a launcher such as torchrun has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(work: Work, tell: Callable[[Event], None]) -> None:
    """Train under a plan; `tell` gets the events of the first process. Raises what ended the run too early."""
    if joined_from_outside():
        _outside(work, tell)
    elif work.world == 1:
        from meshwright.run.worker import work_alone

        work_alone(work, tell)
    else:
        _local(work, tell)


def _outside(work: Work, tell: Callable[[Event], None]) -> None:
    said = int(os.environ["WORLD_SIZE"])
    if said != work.world:
        problem = f"the plan runs on {work.world} devices, the launcher started {said} processes"
        raise InputError(problem, field="--plan", valid=f"a plan for {said} devices, or {work.world} processes")
    from meshwright.run.worker import work_together

    work_together(work, int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0")), tell)


def _local(work: Work, tell: Callable[[Event], None]) -> None:
    """Forked from a server that has imported torch and done nothing with it: a start is cheap, threads are fresh."""
    work = replace(work, port=free_port())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["meshwright.run.worker"])
    events: Any = context.Queue()
    watched, held = context.Pipe(duplex=False)  # closes when this process ends, however it ends
    from meshwright.run.worker import enough_devices, work_locally

    enough_devices(work.world)
    processes = [
        context.Process(target=work_locally, args=(work, rank, events, watched), name=f"meshwright-{rank}", daemon=True)
        for rank in range(work.world)
    ]
    # Ctrl-C reaches the whole group of processes; the workers are told by us, and end after a whole step.
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    asked: list[float] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.append(time.monotonic()))
    try:
        with script_left_alone():
            for process in processes:
                process.start()
        _watch(processes, events, tell, asked)
    finally:
        _end(processes)
        held.close()
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)


def _watch(processes: list[Any], events: Any, tell: Callable[[Event], None], asked: list[float]) -> None:
    """Until all have ended; a failure ends the others, a signal asks all to end."""
    failures: list[tuple[int, dict[str, Any]]] = []
    told, since = False, float("inf")
    while True:
        if asked and not told:
            told = True
            _ask(processes)
        if len(asked) > 1:
            raise TrainingFailed(AT_ONCE)
        alive = any(process.is_alive() for process in processes)
        try:
            kind, rank, facts = events.get(timeout=0.1 if alive else 0.5)
        except queue.Empty:
            kind, rank, facts = "", 0, {}
        if kind == "event":
            tell(facts)
        elif kind == "failure":
            failures.append((rank, facts))
        died = [process for process in processes if process.exitcode not in (None, 0)]
        if failures or died:
            since = min(since, time.monotonic())
        known = any(not facts["consequence"] for _, facts in failures) or any(p.exitcode < 0 for p in died)
        if not kind and (not alive or time.monotonic() > since + (_KNOWN if known and failures else _PATIENCE)):
            break
    if asked and died and all(facts["consequence"] for _, facts in failures):
        tell({"event": "stopped", "time": time.time(), "step": 0})  # before the first step: nobody was listening yet
    elif failures or died:
        raise _reason(failures, died)


def _ask(processes: list[Any]) -> None:
    """All to end after a whole step."""
    print(STOPPING, file=sys.stderr)  # noqa: T201
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGTERM)


def _reason(failures: list[tuple[int, dict[str, Any]]], died: list[Any]) -> Exception:
    """The failure that came first for a reason of its own; a lost peer is a consequence."""
    said = sorted((facts for _, facts in failures), key=lambda facts: (facts["consequence"], facts["time"]))
    killed = [process for process in died if process.exitcode < 0]
    if said and not (said[0]["consequence"] and killed):
        error: Exception = said[0]["error"]
        return error
    first = (killed or died)[0]
    number = first.name.rpartition("-")[2]
    if first.exitcode > 0:
        return TrainingFailed(f"process {number} ended with code {first.exitcode}")
    name = signal.Signals(-first.exitcode).name
    return TrainingFailed(
        f"process {number} was ended by {name}{': was it out of memory?' if name == 'SIGKILL' else ''}"
    )


def _end(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def quiet_exit(code: int) -> None:
    """End this process at once, without waiting for threads that wait for others."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
