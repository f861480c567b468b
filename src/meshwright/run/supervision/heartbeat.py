"""Heartbeats of the ranks, in the store through which they joined: shared facts while ranks cannot communicate.

A thread of each rank writes the rank's position every second, through a connection of its own. If a rank is lost or a
collective does not end, the first rank that notices reads all heartbeats and reports the cause for everybody. The cause
is the rank whose process is gone or stopped, whose heartbeat has ended, or which waits for no other rank.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshwright.base.processes import state_of
from meshwright.errors import FAILED, MeshwrightError

EVERY = 1.0  # seconds between two writes
ENDED = "ended"  # the phase of a rank that has nothing left to do
_SILENT = 3.5  # seconds without a write until a rank counts as not running
_ANSWER = 12.0  # seconds that finding the cause may take; after that the host of the store is the cause


@dataclass(frozen=True)
class Beat:
    """Position of one rank."""

    rank: int
    host: str
    machine: str  # processes of one machine can check each other
    pid: int
    started: str  # start of the process: process numbers are reused
    phase: str
    line: str  # line of our code at which its main thread is
    waits: bool  # waits there for other ranks
    count: int = 0

    @property
    def name(self) -> str:
        """Name of the rank for people."""
        return f"rank {self.rank} ({self.host}, process {self.pid})"


@dataclass
class News:
    """News of other ranks, from the last look into the store."""

    stop: int = 0  # a signal that another rank received
    failure: Cause | None = None  # cause on another rank, in its own words


@dataclass(frozen=True)
class Cause:
    """Why a run ends, the same for all ranks; `mine` on the one rank that reports it."""

    text: str
    code: int = FAILED
    mine: bool = False
    error: MeshwrightError | None = field(default=None, compare=False)  # of this rank, as it was raised

    def written(self) -> str:
        return json.dumps({"text": self.text, "code": self.code})


class Heartbeat:
    """Heartbeat of one rank, and news of others. Only its own thread uses the store, which may never answer."""

    def __init__(self, here: Callable[[], Beat], world: int, address: tuple[str, int], prefix: str) -> None:
        self.news, self._here, self._world = News(), here, world
        self._address, self._prefix = address, prefix
        self._wanted: queue.Queue[tuple[Callable[[Any], Any], queue.Queue[Any]]] = queue.Queue()
        self._over, self._lost, self._count = threading.Event(), threading.Event(), 0
        self._first: Beat | None = None  # the last beat of rank 0, which keeps the store unless a launcher does
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Write that this rank has ended as it should, and stop."""
        self._ask(self._write, 2.0)
        self._over.set()

    def write_soon(self) -> None:
        """Write this rank's position before the next second; called when it begins something that matters to others."""
        self._wanted.put((self._write, queue.Queue()))

    def announce(self, key: str, value: str, seconds: float = 3.0) -> bool:
        """Write one fact for all ranks; return True on the rank that may report it: the one that wrote it first.

        If the store does not answer, that is the first rank of every node.
        """

        def write(store: Any) -> bool:
            if store.add(f"{key}/first", 1) > 1:
                return False
            store.set(key, value)
            return True

        found = self._ask(write, seconds)
        return first_of_node() if found is None else bool(found)

    def lost_here(self) -> bool:
        """Return True if the process of a rank on this machine has ended without a report."""

        def look(store: Any) -> bool:
            here = self._here()
            return any(lost(beat, here.machine) for beat in self._beats(store) if beat.rank != here.rank)

        return bool(self._ask(look, 2.0))

    def cause(self, own: str) -> Cause:
        """Return the cause of a failure; `own` is this rank's message if no rank is at fault."""
        found = self._ask(lambda store: self._judge(store, own), _ANSWER)
        if found is None:
            return self._keeper_lost()
        judged: Cause = found
        return judged

    def _keeper_lost(self) -> Cause:
        here, (host, port), mine = self._here(), self._address, first_of_node()
        if _kept_by_launcher() or self._first is None:
            return Cause(
                f"the launcher at {host}:{port}, through which the ranks meet, was lost or is stopped", mine=mine
            )
        text = lost(self._first, here.machine) or f"{self._first.name} does not answer: it was lost or is stopped"
        end_stopped([self._first], here.machine)
        return Cause(text, mine=mine)

    def _ask(self, what: Callable[[Any], Any], seconds: float) -> Any:
        """Return the thread's answer, or None if the store does not answer in time."""
        answer: queue.Queue[Any] = queue.Queue()
        self._wanted.put((what, answer))
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._lost.is_set():
            with suppress(queue.Empty):
                return answer.get(timeout=0.1)
        return None

    def _run(self) -> None:
        store, probe = None, None
        while not self._over.is_set() and not self._lost.is_set():
            try:
                if store is None:
                    store, probe = self._connected()
                if store is None:
                    time.sleep(0.2)
                elif probe and _closed(probe):
                    self._lost.set()
                else:
                    self._write(store)
                    self._answer(store)
            except (RuntimeError, OSError):  # the store is gone: waiting threads get no answer
                self._lost.set()

    def _connected(self) -> tuple[Any, socket.socket | None]:
        """Connect to the store, after a plain connection has shown that it is there.

        PyTorch prints pages of frames if it is asked for a store that is gone.
        """
        try:
            probe = socket.create_connection(self._address, timeout=2.0)
        except OSError:
            return None, None
        store = dist.TCPStore(*self._address, None, False, timedelta(seconds=10), wait_for_workers=False)
        return dist.PrefixStore(self._prefix, store), probe

    def _write(self, store: Any) -> None:
        here, self._count = self._here(), self._count + 1
        store.set(f"beat/{here.rank}", json.dumps(asdict(here) | {"count": self._count}))
        if not _kept_by_launcher() and here.rank and store.check(["beat/0"]):
            self._first = Beat(**json.loads(store.get("beat/0")))
        stop, failure = self.news.stop, self.news.failure
        if not stop and store.check(["stop"]):
            stop = int(store.get("stop"))
        if not failure and store.check(["failure"]):
            failure = Cause(**json.loads(store.get("failure")))
        self.news = News(stop, failure)

    def _answer(self, store: Any) -> None:
        """Answer requests of this process's other threads to the store, until the next write."""
        until = time.monotonic() + EVERY
        while not self._over.is_set() and (left := until - time.monotonic()) > 0:
            try:
                what, answer = self._wanted.get(timeout=min(left, 0.1))
            except queue.Empty:
                continue
            answer.put(what(store))

    def _judge(self, store: Any, own: str) -> Cause:
        self._write(store)
        if self.news.failure:
            return self.news.failure
        mine = store.add("cause/first", 1) == 1
        if mine:
            store.set("cause", culprits(lambda: self._beats(store), self._here(), own))
        until = time.monotonic() + _ANSWER - 2
        while not store.check(["cause"]) and time.monotonic() < until:
            self._write(store)  # this rank lives: its silence must not be taken for the cause
            time.sleep(0.3)
        if mine or os.environ.get("LOCAL_RANK") == "0":
            end_stopped(self._beats(store), self._here().machine)
        return Cause(store.get("cause").decode() if store.check(["cause"]) else own, mine=mine)

    def _beats(self, store: Any) -> list[Beat]:
        self._write(store)
        written = [f"beat/{rank}" for rank in range(self._world) if store.check([f"beat/{rank}"])]
        return [Beat(**json.loads(text)) for text in (store.multi_get(written) if written else [])]


def culprits(look: Callable[[], list[Beat]], here: Beat, own: str) -> str:
    """Return a message that names the ranks at fault, from all heartbeats at two times."""
    before = [beat for beat in look() if beat.rank != here.rank]
    if found := [text for beat in before if (text := lost(beat, here.machine))]:
        return "; ".join(found)
    time.sleep(_SILENT)
    after = {beat.rank: beat for beat in look()}
    if found := [text for beat in before if (text := lost(beat, here.machine))]:
        return "; ".join(found)
    silent = [beat for beat in before if after[beat.rank].count == beat.count and beat.phase != ENDED]
    if silent:
        why = "does not answer any more: its process or its host was lost, is stopped or is cut off"
        return "; ".join(f"{beat.name} {why} in {beat.phase}" for beat in silent)
    busy = [beat for beat in (*before, here) if not after.get(beat.rank, beat).waits and beat.phase != ENDED]
    if busy and len(busy) <= len(before):
        return "; ".join(f"{beat.name} hangs in {beat.phase}, at {beat.line}" for beat in busy[:4])
    return f"{here.name}, in {here.phase}, at {here.line}: {own}"


def lost(beat: Beat, machine: str) -> str:
    """Return why a process of this machine does not run; empty if it runs, has ended, or is on another machine."""
    if beat.machine != machine or not beat.started or beat.phase == ENDED:
        return ""
    state = state_of(beat.pid, beat.started)
    why = {"": "was ended", "Z": "was ended", "X": "was ended", "T": "is stopped"}.get(state)
    return f"{beat.name} {why} in {beat.phase}" if why else ""


def _kept_by_launcher() -> bool:
    """Return True if a launcher keeps the store, not rank 0; torchrun sets an environment variable then."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def first_of_node() -> bool:
    """Return True on the rank that reports if ranks cannot agree on one: the first of every node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def end_stopped(beats: Sequence[Beat], machine: str) -> None:
    """Kill the ranks of this machine that are stopped: they cannot end themselves."""
    for beat in beats:
        if beat.machine == machine and state_of(beat.pid, beat.started) == "T":
            with suppress(OSError):
                os.kill(beat.pid, signal.SIGKILL)


def _closed(probe: socket.socket) -> bool:
    """Return True if the other end of an idle connection is gone."""
    probe.setblocking(False)
    try:
        return not probe.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
