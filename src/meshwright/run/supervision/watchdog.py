"""The watchdog of one rank: it receives signals, measures how long nothing went on, and reports which rank is at fault.

It is a thread, since the main thread mostly waits inside PyTorch for other ranks. It can end the process without the
main thread, which may never return.
"""

from __future__ import annotations

import linecache
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from meshwright.base.processes import started_at, state_of, this_machine
from meshwright.errors import STOPPED
from meshwright.run.supervision.heartbeat import ENDED, Beat, Cause, Heartbeat, first_of_node
from meshwright.run.supervision.stop_signals import AT_ONCE, Asked, StopSignals, stopping

FLOOR = 300.0  # seconds that a rank may let others wait, however short a step is
ELSEWHERE = 3600.0  # the same if a plan for other devices runs: its prediction does not hold here
STEPS = 20.0  # in units of a predicted step
SAVING = 1800.0  # seconds: a checkpoint on a slow disk
JOINING = 600.0  # seconds until all ranks are there: hosts start at different times
_LOOK = 0.25  # seconds between looks
_PAUSED = 5.0  # seconds that this thread did not run: the process was stopped, and the time does not count
_HALTED = "the launcher is stopped: "
_OURS = str(Path(__file__).resolve().parents[1])
# Calls in which a rank waits for others; without source code at hand, it counts as waiting.
_WAITS = ("wait(", "dist.", "reduce", "gather", "barrier", "backward(", ".item()", ".tolist()", "float(", "synchronize")


def limit_of(wait: float, step_seconds: float, *, here: bool = True) -> float:
    """Return how long a rank may let others wait, in seconds; `wait` is the user's setting, 0 for none.

    `here`: the plan is for devices of this kind, so that its predicted step holds.

    >>> limit_of(0, 2.0), limit_of(0, 60.0), limit_of(15, 60.0)
    (300.0, 1200.0, 15)
    """
    return wait or max(FLOOR if here else ELSEWHERE, STEPS * step_seconds)


@dataclass(frozen=True)
class Member:
    """One process: its rank, its launcher, and how it sends messages and ends."""

    rank: int = 0
    world: int = 1
    limit: float = FLOOR
    launcher: int = 0  # process that must be alive and running; 0: none
    ends_at_once: bool = False  # a repeated Ctrl-C ends this process; otherwise its launcher ends it
    reads: Callable[[], bool] = lambda: True  # a launcher elsewhere still reads events
    report: Callable[[str, int], None] = lambda text, number: print(text, file=sys.stderr, flush=True)  # noqa: T201


@dataclass
class _Phase:
    name: str
    limit: float
    since: float = field(default_factory=time.monotonic)


class Watchdog:
    """Watchdog of this process and its peers, until it is closed."""

    def __init__(self, member: Member, signals: StopSignals, leave: Callable[[Cause], None]) -> None:
        """Start watching. `leave` ends the process, from the watchdog's thread."""
        self._member, self._signals, self._leave = member, signals, leave
        self._phase, self._asked = _Phase("starting", JOINING), Asked()
        self._main, self._trained, self._reported = threading.get_ident(), False, False
        self._machine, self._started = this_machine(), started_at(os.getpid())
        self._born = started_at(member.launcher) if member.launcher else ""
        self._unread = self._ran = time.monotonic()  # when the launcher last read events; when this thread last ran
        self._heart: Heartbeat | None = None
        self._over = threading.Event()
        if member.world > 1:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            prefix = f"meshwright/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            self._heart = Heartbeat(self._here, member.world, address, prefix)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def phase(self, name: str, limit: float = 0.0) -> None:
        """Begin another phase in the main thread; `limit`: seconds that it may take, if not the default."""
        self._phase = _Phase(name, limit or self._member.limit)

    def step(self, number: int) -> None:
        """Begin a step: from now on a signal ends the run after it."""
        self.phase(f"step {number}")
        if not self._trained and self._heart:
            self._heart.write_soon()
        self._trained = True

    def asked(self) -> int:
        """Return the signal that asks the run to stop, or 0."""
        return self._asked.number

    def failed(self, cause: Cause) -> bool:
        """Report that this rank fails for a reason of its own; return True if it is the first to do so."""
        return self._heart.announce("failure", cause.written()) if self._heart else True

    def cause(self, own: str) -> Cause:
        """Return the cause of a wait that failed."""
        return self._heart.cause(own) if self._heart else Cause(own, mine=True)

    def all_saved(self) -> None:
        """Wait for the other ranks to save: launchers end the rest as soon as one ends with a nonzero code."""
        self.phase("waiting for the other ranks to save", SAVING)
        with suppress(RuntimeError):  # a rank that is lost now has nothing to save
            dist.all_reduce(torch.zeros(1))
        self._over.set()
        self._signals.ignore()
        launcher = self._member.launcher
        if launcher and self._born and state_of(launcher, self._born) == "T" and first_of_node():
            self._report(signal.SIGTERM, _HALTED)  # the store stops with it: no rank can know which one reports
            with suppress(OSError):  # the launcher cannot end itself, and has nothing left to do
                os.kill(launcher, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching: the run is over for this rank."""
        self._over.set()
        self.phase(ENDED, float("inf"))
        if self._heart:
            self._heart.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over.is_set():
            for number in self._signals.heard(_LOOK):
                self._hear(number)
            now = time.monotonic()
            if now - last > _PAUSED:
                self._phase.since += now - last
                self._unread = self._ran = now
            last = now
            self._look(now)

    def _hear(self, number: int, why: str = "") -> None:
        first = self._asked.add(number, again=self._member.ends_at_once and number == signal.SIGINT)
        if self._asked.at_once:
            self._end(Cause(AT_ONCE, mine=True))
        if not first:
            return
        if self._heart and self._heart.lost_here():
            self._asked.withdraw()  # a launcher ends the remaining ranks after one was lost
            return
        if not self._heart or self._heart.announce("stop", str(number)):
            self._report(number, why)
        if self._heart and not self._trained:
            self._end(Cause("", STOPPED))

    def _report(self, number: int, why: str) -> None:
        if self._reported:
            return
        self._reported = True
        who = f"{self._name()}: " if self._heart else ""
        self._member.report(f"{who}{why}{stopping(number)}", number)

    def _look(self, now: float) -> None:
        news = self._heart.news if self._heart else None
        # The main thread may find the same error; otherwise it would wait for the failed rank.
        if news and news.failure and not self._over.wait(3.0):
            self._end(news.failure)
        if news and news.stop and not self._asked.number:
            self._asked.add(news.stop, again=False)
            if not self._trained:
                self._end(Cause("", STOPPED))
        self._look_at_launcher(now)
        if self._heart and now > self._phase.since + self._phase.limit:
            waited = f"nothing went on for {self._phase.limit:g} s (--wait)"
            found = self.cause(waited)
            text = found.text if waited in found.text else f"{found.text}: {waited}"
            self._end(Cause(text, found.code, found.mine))

    def _look_at_launcher(self, now: float) -> None:
        launcher = self._member.launcher
        if launcher and self._started:  # processes can be checked here
            state = state_of(launcher, self._born) if self._born else ""  # it was gone before this process checked
            if state in ("", "Z"):
                text = f"{self._name()}: its launcher (process {launcher}) was ended in {self._phase.name}"
                self._end(Cause(text, mine=self.failed(Cause(text))))
            if state != "T":
                self._ran = now
        else:
            self._ran = now
        if self._member.reads():
            self._unread = now
        if now > min(self._ran, self._unread) + self._member.limit and not self._asked.number:
            self._hear(signal.SIGTERM, _HALTED)

    def _end(self, cause: Cause) -> None:
        if not self._over.is_set():
            self._over.set()
            self._leave(cause)

    def _name(self) -> str:
        return f"rank {self._member.rank} ({socket.gethostname()}, process {os.getpid()})"

    def _here(self) -> Beat:
        line, waits = _standing(sys._current_frames().get(self._main))
        place = self._machine, os.getpid(), self._started
        return Beat(self._member.rank, socket.gethostname(), *place, self._phase.name, line, waits)


def _standing(frame: FrameType | None) -> tuple[str, bool]:
    """Return the innermost line of our own code that a thread is at, and True if it waits for other ranks there."""
    inner: Any = frame
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is None:
        return "a line that is not known", True
    source = linecache.getline(inner.f_code.co_filename, inner.f_lineno)
    mine = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    where = f"{os.path.relpath(frame.f_code.co_filename, _OURS)}:{frame.f_lineno}"
    inside = "torch" in inner.f_code.co_filename or not source
    return where, inside or any(word in source + mine for word in _WAITS)
