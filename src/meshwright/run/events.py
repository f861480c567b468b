"""What a run says: one JSON object per line and process, and the same numbers for TensorBoard."""

from __future__ import annotations

import time
from pathlib import Path
from typing import IO, Any

from meshwright.files import line_of


class Events:
    """Written to `events.jsonl` of the run's folder (other processes: `events-3.jsonl`), flushed line by line."""

    def __init__(self, folder: str, rank: int) -> None:
        self._file: IO[str] | None = None
        self._board: Any = None
        if not folder:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._file = (Path(folder) / ("events.jsonl" if rank == 0 else f"events-{rank}.jsonl")).open(
            "a", encoding="utf-8"
        )
        if rank == 0:
            self._board = _tensorboard(folder)

    def say(self, event: str, **facts: Any) -> dict[str, Any]:
        """Write one event, and return it."""
        found = {"event": event, "time": time.time(), **facts}
        if self._file:
            self._file.write(line_of(found) + "\n")
            self._file.flush()
        if self._board and event in ("step", "evaluation"):
            for name, value in facts.items():
                if isinstance(value, int | float) and name != "step":
                    self._board.add_scalar(f"{event}/{name}", value, facts["step"])
        return found

    def close(self) -> None:
        """Nothing more is said."""
        for one in (self._file, self._board):
            if one:
                one.close()


def _tensorboard(folder: str) -> Any:
    """A writer where TensorBoard is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(Path(folder) / "tensorboard"))
