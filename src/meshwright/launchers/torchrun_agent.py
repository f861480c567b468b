"""torchrun with meshwright's signals and exit codes: `python -m meshwright.launchers.torchrun_agent` takes its options.

torchrun itself ends with 1, whatever the exit codes of its workers. After a signal it waits up to 300 s for other
nodes, and may then end with 0 although a run was not finished. Here a signal goes to the ranks of this node, which stop
all others and save; the exit code is theirs. In this room only this file and Ray's `rank.py` import torch, and only
where ranks run.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.errors import BAD_INPUT, FAILED, STOPPED

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def main() -> None:
    """Run torchrun's agent of this node until its ranks have ended."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    arguments = parse_args(sys.argv[1:])
    arguments.signals_to_handle = "SIGQUIT"  # the agent forwards these, and the ranks decide
    if str(arguments.nproc_per_node).isdigit():
        # torchrun would give each of several ranks one thread, whatever the plan was measured with.
        cores = len(os.sched_getaffinity(0)) // int(arguments.nproc_per_node)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
    for number in _PASSED_ON:
        signal.signal(number, _pass_on)
    try:
        run(arguments)
    except ChildFailedError as error:
        ends: dict[int, Any] = error.failures
        alone = arguments.standalone or str(arguments.nnodes) in ("1", "1:1")
        if alone and all(one.exitcode < 0 for one in ends.values()):  # no rank was left to report it
            rank, first = min(ends.items(), key=lambda item: int(item[1].timestamp))
            name = signal.Signals(-first.exitcode).name
            who = f"rank {rank} ({socket.gethostname()}, process {first.pid})"
            print(f"error: {who} was ended by {name}", file=sys.stderr)  # noqa: T201
        sys.exit(code_of(one.exitcode for one in ends.values()))


def code_of(codes: Iterable[int]) -> int:
    """Return the exit code of a node from those of its ranks; negative ones were killed, perhaps by the agent.

    >>> code_of([STOPPED, -15]), code_of([BAD_INPUT, FAILED]), code_of([-9, FAILED]), code_of([FAILED, STOPPED])
    (3, 2, 1, 1)
    """
    own = {code for code in codes if code > 0}
    if own == {STOPPED}:
        return STOPPED
    return BAD_INPUT if BAD_INPUT in own else FAILED


def _pass_on(number: int, _: object) -> None:
    """Send a signal to the ranks of this node. Without ranks the run has not begun, or is over."""
    ranks = _children()
    if not ranks:
        sys.exit(STOPPED)
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank, signal.SIGTERM if number == signal.SIGHUP else number)


def _children() -> list[int]:
    """Return the processes that this one has started, from any thread."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


if __name__ == "__main__":
    main()
