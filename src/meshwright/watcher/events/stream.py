"""Output of events: a bounded list that a thread writes to one file per rank, or as text to the terminal.

Nothing is lost when the program ends by itself, by an exception or by `sys.exit`. `atexit` writes the rest, and in
children of multiprocessing its own finalizers do. No signal handler is installed: a process that a signal ends at once
loses unwritten events, a fifth of a second at most.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import platform
import sys
import threading
import time
import weakref
from multiprocessing import current_process, parent_process, util
from typing import IO, Any

import msgspec

from meshwright.watcher.events.events import Event, stream_path
from meshwright.watcher.events.rank import is_loader, rank_of_process, rank_said, starts_loader
from meshwright.watcher.events.text import line_of

FULL = 1 << 15  # events, beyond which the watched thread itself writes, so that memory stays bounded
_PAUSE = 0.2  # seconds between two writes
_PATIENCE = 10  # seconds that a child waits until torch.distributed sets its rank
_STREAMS: weakref.WeakSet[Stream] = weakref.WeakSet()


class Stream:
    """Writer of events: append `Event`s to `buffer`, with rank 0; call `full()` now and then."""

    def __init__(self, output: str | None, ranks: frozenset[int] | None, parent: int | None = None) -> None:
        self.buffer: list[Event] = []
        self._output, self._ranks = output, ranks
        self._file: IO[bytes] | None = None
        self._rank: int | None = None
        self._parent = parent  # the rank of the parent process, if that is watched too
        self._closed = self._launched = False
        self._begin()
        _STREAMS.add(self)
        atexit.register(self.close)
        util.register_after_fork(self, Stream._finalize_in_child)

    def _begin(self) -> None:
        self._lock, self._writing = threading.RLock(), False
        self._wake, self._decide = threading.Event(), time.monotonic() + _PATIENCE
        # not a threading.Thread: programs that wait until one thread is left must not wait for this one
        _thread.start_new_thread(_write_now_and_then, (weakref.ref(self), self._wake))

    def taken_rank(self) -> int | None:
        """Return the rank of this stream before a process is started, so that the child does not take it."""
        if not starts_loader():  # helpers are no ranks
            self._launched = True
            if self._file is None and rank_said() is None:
                return None
        return self._rank if self._rank is not None else rank_of_process(surely=True)

    def full(self) -> bool:
        return len(self.buffer) >= FULL

    def write(self, *, last: bool = False) -> None:
        """Write the buffered events; a nested call does nothing."""
        with self._lock:
            if self._writing or not (self.buffer or (last and self._file)):
                return
            self._writing = True
            try:
                self._write(last or self.full() or time.monotonic() > self._decide)
            except OSError as error:  # a full disk must not end the program
                self._ranks = frozenset()
                self._print(f"the watch ends here: {error.filename or self._output}: {error.strerror or error}")
            finally:
                self._writing = False

    def _write(self, surely: bool) -> None:
        if self._rank is None:
            self._rank = self._parent if is_loader() and self._parent is not None else rank_of_process(surely=surely)
            if self._rank is None:
                return  # torch.distributed will set the rank
        count = len(self.buffer)  # events appended meanwhile stay
        batch = self.buffer[:count]
        del self.buffer[:count]
        if self._ranks is not None and self._rank not in self._ranks:
            return
        for event in batch if self._rank else ():  # events already have rank 0
            event.rank = self._rank
        if self._helper():
            for event in batch:
                event.thread = f"{current_process().name}/{event.thread}"
        if self._output is None:
            self._say(batch)
            return
        if self._file is None:
            batch.insert(0, self._mark("start", batch[0].time))
        lines = _lines(batch)  # before the file exists: a process that is ended now leaves no empty one
        if self._file is None:
            self._file = open(self._path(), "wb")  # noqa: SIM115 - open until the end
        self._file.write(lines)
        self._file.flush()

    def _helper(self) -> bool:
        """Return True if this process helps the one that has this rank, such as a data loader."""
        return self._rank == self._parent and (is_loader() or os.environ.get("RANK", "").isdecimal())

    def _path(self) -> str:
        path = stream_path(str(self._output), self._rank or 0)
        # processes that start ranks or help one leave the plain name to the rank
        beside = self._rank == self._parent or (self._launched and rank_said() is None)
        return path.replace(".jsonl", f".pid{os.getpid()}.jsonl") if beside else path

    def _mark(self, event: str, when: int) -> Event:
        started_by = parent_process()
        parent = started_by.pid if started_by is not None else os.getppid()
        text = f"pid {os.getpid()}, parent {parent} on {platform.node()}, Python {platform.python_version()}"
        return Event(event, when, self._rank or 0, "", 0, "watch", text=text)

    def _say(self, batch: list[Event]) -> None:
        for event in batch:
            event.text = str(event.text)  # as below
        self._print("\n".join(map(line_of, batch)))

    def _print(self, text: str) -> None:
        stderr: Any = sys.stderr
        if stderr is not None:
            with contextlib.suppress(OSError, ValueError):  # the reader has gone
                stderr.write(f"{text}\n")
                stderr.flush()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        self.write(last=True)
        with self._lock:
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.write(msgspec.json.encode(self._mark("stop", time.time_ns())) + b"\n")
                    self._file.close()
                self._file = None
        atexit.unregister(self.close)

    def after_fork(self) -> None:
        """Start a file of its own in a forked child: the parent writes its own events."""
        if self._closed:
            return
        self.buffer.clear()
        self._parent = self.taken_rank()
        if self._file is not None:
            self._file.close()
        self._file, self._rank, self._launched = None, None, False
        self._begin()

    def _finalize_in_child(self) -> None:
        util.Finalize(self, self.close, exitpriority=0)  # children of multiprocessing end without atexit


def _lines(batch: list[Event]) -> bytes:
    encoder = msgspec.json.Encoder(enc_hook=str)  # C leaves tensors, and texts about them, to be formatted here
    try:
        return encoder.encode_lines(batch)
    except UnicodeEncodeError:  # texts of the program with unpaired surrogates
        for event in batch:
            event.text = str(event.text).encode("utf-8", "replace").decode()
            event.thread = event.thread.encode("utf-8", "replace").decode()
        return encoder.encode_lines(batch)


def _write_now_and_then(stream: weakref.ref[Stream], wake: threading.Event) -> None:
    while not wake.wait(_PAUSE):
        alive = stream()
        if alive is None:
            return
        alive.write()
        del alive


def _in_child() -> None:
    for stream in list(_STREAMS):
        stream.after_fork()


def _in_parent() -> None:
    for stream in list(_STREAMS):
        stream.taken_rank()


os.register_at_fork(after_in_parent=_in_parent, after_in_child=_in_child)
