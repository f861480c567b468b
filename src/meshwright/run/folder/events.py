"""Events of a run: one JSON object per line and rank, and the same numbers for TensorBoard."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from meshwright.base.files import line_of
from meshwright.run.folder.checks import unwritable


class Events:
    """Writer of `events.jsonl` in the run's folder (other ranks: `events-3.jsonl`), line by line."""

    def __init__(self, folder: str, rank: int) -> None:
        self._file: _Appended | None = None
        self._board: _Board | None = None
        if not folder:
            return
        self._file = _Appended(Path(folder) / ("events.jsonl" if rank == 0 else f"events-{rank}.jsonl"))
        self._file.end_line()
        if rank == 0:
            self._board = _board(Path(folder) / "tensorboard")

    def say(self, event: str, **facts: Any) -> dict[str, Any]:
        """Write one event, and return it."""
        found = {"event": event, "time": time.time(), **facts}
        if self._file:
            self._file.write(line_of(found).encode() + b"\n")
        if self._board and event in ("step", "evaluation"):
            numbers = {f"{event}/{name}": value for name, value in facts.items() if isinstance(value, int | float)}
            numbers.pop(f"{event}/step")
            self._board.add(numbers, facts["step"], found["time"])
        return found

    def close(self) -> None:
        """Close both files."""
        for one in (self._file, self._board):
            if one:
                one.close()


class _Appended:
    """File that is appended to without a buffer, so that a disk error appears at the event it concerns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise unwritable(path, error) from None

    def end_line(self) -> None:
        """End a line that a dead run left incomplete, so that the next one can be read; readers skip it."""
        with self._path.open("rb") as opened:
            if self._path.is_file() and opened.seek(0, os.SEEK_END):
                opened.seek(-1, os.SEEK_END)
                if opened.read(1) != b"\n":
                    self.write(b"\n")

    def write(self, data: bytes) -> None:
        """Write all of it; TensorBoard's record writer calls this too."""
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise unwritable(self._path, error) from None

    def close(self) -> None:
        self._file.close()


class _Board:
    """TensorBoard scalars, one record per step. PyTorch's own writer has a thread that prints tracebacks."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = _Appended(folder / name)
        self._records = RecordWriter(self._file)
        self._write(wall_time=time.time(), file_version="brain.Event:2")

    def add(self, numbers: dict[str, float], step: int, when: float) -> None:
        """Write the numbers of one step."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._write(wall_time=when, step=step, summary=self._summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(**fields).SerializeToString())


def _board(folder: Path) -> _Board | None:
    """Return a writer if TensorBoard is installed, else None."""
    try:
        return _Board(folder)
    except ImportError:
        return None
