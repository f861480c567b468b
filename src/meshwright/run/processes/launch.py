"""Start the ranks of a plan on this machine, or join those that a launcher has started.

A run ends with one message: the first rank that fails for a reason of its own reports it, and the others are ended.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from typing import Any

from meshwright.base.processes import script_left_alone
from meshwright.errors import STOPPED, InputError, TrainingFailed
from meshwright.run.options import Training
from meshwright.run.supervision.stop_signals import AT_ONCE, SAME, SIGNALS, stopping

_PATIENCE = 12.0  # seconds that ranks get to find the reason once one has ended too early
_KNOWN = 1.0  # the same once one has reported it
_TOGETHER = 25.0  # seconds that ranks get to end once one has ended because the run was stopped
Event = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """Work that every rank is given."""

    plan: dict[str, Any]
    run: Training
    step_seconds: float
    mfu: float
    world: int
    port: int = 0


def joined_from_outside() -> bool:
    """Return True if a launcher such as torchrun has started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(work: Work, tell: Callable[[Event], None], *, ours: bool = False) -> int:
    """Train under a plan; `tell` gets the first rank's events. Raise the error that ended the run too early.

    Return the signal that stopped the run early, or 0. `ours`: the process is not a program of the user's; a rank that
    a launcher started then ends here, with its exit code.
    """
    if joined_from_outside():
        return _outside(work, tell, ours=ours)
    if work.world == 1:
        from meshwright.run.processes.worker import work_alone

        return work_alone(work, tell)
    return _local(work, tell)


def _outside(work: Work, tell: Callable[[Event], None], *, ours: bool) -> int:
    started = int(os.environ["WORLD_SIZE"])
    if started != work.world:
        problem = f"the plan runs on {work.world} devices, the launcher started {started} processes"
        raise InputError(problem, field="--plan", valid=f"a plan for {started} devices, or {work.world} processes")
    from meshwright.run.processes.worker import work_alone, work_together

    if work.world == 1:
        return work_alone(work, tell)
    return work_together(work, int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0")), tell, ours=ours)


def _local(work: Work, tell: Callable[[Event], None]) -> int:
    """Train with ranks forked from a server that has only imported torch: starting is cheap, and threads are fresh."""
    from meshwright.run.processes.worker import enough_devices, store_of_ranks, work_locally

    enough_devices(work.world)
    store = store_of_ranks()
    work = replace(work, port=store.port)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["meshwright.run.processes.worker"])
    _start_server()
    messages: Any = context.Queue()
    processes = [
        context.Process(
            target=work_locally, args=(work, rank, messages, os.getpid()), name=f"meshwright-{rank}", daemon=True
        )
        for rank in range(work.world)
    ]
    # Ctrl-C reaches the whole process group; ranks get the signal from us, and end after a whole step.
    with asked_to_stop() as asked:
        try:
            with script_left_alone():
                for process in processes:
                    process.start()
            return _Watch(processes, messages, tell, asked).until_the_end()
        finally:
            _end(processes)


@contextmanager
def asked_to_stop() -> Iterator[list[tuple[int, float]]]:
    """Collect signals that ask to stop, with their times; outside the main thread there are none."""
    found: list[tuple[int, float]] = []
    if threading.current_thread() is not threading.main_thread():
        yield found
        return

    def hear(number: int, _: object) -> None:
        found.append((number, time.monotonic()))

    wanted = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, hear) for number in wanted}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def again(asked: list[tuple[int, float]]) -> bool:
    """Return True if a second signal came: not the first one, forwarded by another process too."""
    return bool(asked) and asked[-1][1] > asked[0][1] + SAME


class _Watch:
    """Loop that follows the ranks of a run on this machine until all have ended."""

    def __init__(
        self, processes: list[Any], messages: Any, tell: Callable[[Event], None], asked: list[tuple[int, float]]
    ) -> None:
        self._processes, self._messages, self._tell, self._asked = processes, messages, tell, asked
        self._passed_on = self._told = 0  # the signal that all ranks were sent; the one that some rank received
        self._failures: list[Event] = []
        self._stopped_event = False

    def until_the_end(self) -> int:
        """Wait for the end, and return the signal that stopped the run early, or 0.

        A failure ends the other ranks, and is raised.
        """
        until = float("inf")
        while True:
            self._pass_on()
            alive = any(process.is_alive() for process in self._processes)
            taken = self._take(0.1 if alive else 0.5)
            ended = [process for process in self._processes if process.exitcode not in (None, 0)]
            failed = [process for process in ended if process.exitcode != STOPPED]
            if ended or self._failures:
                patience = _KNOWN if self._failures else _PATIENCE if failed else _TOGETHER
                until = min(until, time.monotonic() + patience)
            if not taken and (not alive or time.monotonic() > until):
                break
        if self._failures or failed:
            raise self._reason(failed)
        if not ended:
            return 0
        if not self._stopped_event:  # before the first step: no rank was listening yet
            self._tell({"event": "stopped", "time": time.time(), "step": 0})
        return self._passed_on or self._told or signal.SIGTERM

    def _pass_on(self) -> None:
        """Ask all ranks to end after a whole step."""
        if again(self._asked):
            raise TrainingFailed(AT_ONCE)
        if self._asked and not self._passed_on:
            self._passed_on = self._asked[0][0]
            if not self._told:
                print(stopping(self._passed_on), file=sys.stderr)  # noqa: T201
            for process in self._processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGTERM)

    def _take(self, seconds: float) -> bool:
        """Take one message; return True if there was one."""
        try:
            kind, _, facts = self._messages.get(timeout=seconds)
        except queue.Empty:
            return False
        if kind == "event":
            self._stopped_event = self._stopped_event or facts["event"] == "stopped"
            self._tell(facts)
        elif kind == "failure":
            self._failures.append(facts)
        elif not self._asked:  # a rank received a signal of its own
            self._told = facts["signal"]
            print(facts["text"], file=sys.stderr)  # noqa: T201
        return True

    def _reason(self, failed: list[Any]) -> Exception:
        """Return why the run failed: the reason that ranks found, else how the first process ended."""
        killed = [process for process in failed if process.exitcode < 0]
        if self._failures:
            error: Exception = min(self._failures, key=lambda facts: float(facts["time"]))["error"]
            ends = [ended_by(one.exitcode) for one in killed if f"process {one.pid}) was ended" in str(error)]
            return TrainingFailed(f"{error}: {ends[0]}") if ends else error
        process = (killed or failed)[0]
        who = f"rank {process.name.rpartition('-')[2]} ({socket.gethostname()}, process {process.pid})"
        return TrainingFailed(f"{who} {ended_by(process.exitcode)}")


def ended_by(code: int) -> str:
    """Return how a process ended, for people.

    >>> ended_by(-9), ended_by(4)
    ('was ended by SIGKILL: was it out of memory?', 'ended with code 4')
    """
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}{': was it out of memory?' if name == 'SIGKILL' else ''}"


def _start_server() -> None:
    """Start the server that ranks are forked from, with signals to the whole process group blocked.

    Exit codes of ranks come through it. It inherits this thread's signal mask; signals that arrive meanwhile are
    delivered later.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(processes: list[Any]) -> None:
    begun = [process for process in processes if process.pid is not None]
    for process in begun:
        if process.is_alive():
            process.kill()
    for process in begun:
        process.join()


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def quiet_exit(code: int) -> None:
    """End this process at once, without waiting for threads that wait for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
