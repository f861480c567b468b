"""Readers of traces that the system ends, as it does where memory runs out: by a signal that nothing can catch."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from meshwright.traces.gather_ranks import Broken, RankFacts, facts_of


def by_its_file(path: str, cache: bool) -> RankFacts | Broken:
    """Every time that a file whose name begins with "large" is read."""
    if Path(path).name.startswith("large"):
        os.kill(os.getpid(), signal.SIGKILL)
    return facts_of(path, cache)


def once(path: str, cache: bool) -> RankFacts | Broken:
    """The first time that any file is read: there is a file "ended" from then on."""
    try:
        (Path(path).parent / "ended").touch(exist_ok=False)
    except FileExistsError:
        return facts_of(path, cache)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("was not ended")
