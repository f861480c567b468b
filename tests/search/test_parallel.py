"""Work on several cores: the same results, in any order of completion; nothing is left running."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest

from meshwright.base.parallel import in_parallel, workers


def squared(number: int) -> tuple[int, int]:
    time.sleep(0.02 * (5 - number % 5))
    return number * number, os.getpid()


def failing(number: int) -> int:
    if number == 3:
        raise ValueError("three")
    time.sleep(0.5)
    return number


def children() -> set[multiprocessing.process.BaseProcess]:
    """Processes of this one: other tests keep workers for those after them."""
    return set(multiprocessing.active_children())


def test_every_item_once_and_at_its_place() -> None:
    before = children()
    found = dict(in_parallel(squared, list(range(12))))
    assert [found[i][0] for i in range(12)] == [i * i for i in range(12)]
    if workers(12) > 1:
        assert os.getpid() not in {pid for _, pid in found.values()}
    assert children() <= before


def test_one_item_needs_no_worker() -> None:
    assert workers(1) == 1
    assert dict(in_parallel(squared, [4]))[0] == (16, os.getpid())


def test_what_fails_ends_the_rest() -> None:
    before = children()
    with pytest.raises(ValueError, match="three"):
        list(in_parallel(failing, [3, 1, 1, 1, 1, 1, 1, 1]))
    pids = [process.pid for process in children() - before if process.pid]
    deadline = time.monotonic() + 5
    while any(map(alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
