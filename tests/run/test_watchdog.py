"""Who is named when ranks are lost, stop or hang; what signals mean together."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from meshwright.base.processes import started_at, this_machine
from meshwright.run.parallel.apply import apply
from meshwright.run.supervision import heartbeat
from meshwright.run.supervision.heartbeat import ENDED, Beat, Cause, Heartbeat, culprits
from meshwright.run.supervision.stop_signals import Asked, StopSignals
from meshwright.run.supervision.watchdog import Member, Watchdog, limit_of
from meshwright.run.torch_private import limit_collectives
from tests.run.families import CONFIGS
from tests.run.parity import plan_of
from tests.run.pool import pool


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_SILENT", 0.1)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def beat(rank: int, process: int = 0, **facts: Any) -> Beat:
    number = process or os.getpid()
    place = (this_machine(), number, started_at(number))
    return Beat(rank, f"host-{rank}", *place, "step 7", "run/parallel/executor.py:12", waits=True, **facts)


def of(*beats: Beat, later: list[Beat] | None = None) -> str:
    """Return whom the first rank accuses; heartbeats go on but for those in `later`."""
    looks = iter([list(beats), later or [replace(one, count=one.count + 1) for one in beats]])
    return culprits(lambda: next(looks), beats[0], "waited for 10 s")


def test_a_process_that_is_gone_is_named(child: subprocess.Popen[bytes]) -> None:
    found = beat(1, child.pid)
    child.kill()
    assert of(beat(0), found) == f"rank 1 (host-1, process {child.pid}) was ended in step 7"  # not reaped yet: a zombie
    child.wait()
    assert "was ended in step 7" in of(beat(0), found)


def test_a_number_that_is_used_again_is_another_process(child: subprocess.Popen[bytes]) -> None:
    assert "was ended" in of(beat(0), replace(beat(1, child.pid), started="1"))


def test_a_process_that_is_stopped_is_named(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    assert "is stopped in step 7" in of(beat(0), beat(1), beat(2, child.pid))


def test_a_silent_rank_on_another_host_is_named() -> None:
    far = replace(beat(1), machine="another")
    assert "rank 1 (host-1" in of(beat(0), far, later=[beat(0, count=1), far])
    assert "does not answer" in of(beat(0), far, later=[beat(0, count=1), far])


def test_the_rank_that_does_not_wait_hangs() -> None:
    busy = replace(beat(2), waits=False, phase="reading the samples of step 8", line="run/data/prefetch.py:3")
    assert of(beat(0), beat(1), busy).endswith("hangs in reading the samples of step 8, at run/data/prefetch.py:3")


def test_ranks_that_have_ended_are_not_accused() -> None:
    ended = replace(beat(1), phase=ENDED, machine="another")
    assert of(beat(0), ended, later=[beat(0, count=1), ended]).endswith("waited for 10 s")


def test_where_all_wait_the_rank_speaks_for_itself() -> None:
    assert (
        of(beat(0), beat(1))
        == f"rank 0 (host-0, process {os.getpid()}), in step 7, at run/parallel/executor.py:12: waited for 10 s"
    )


@pytest.fixture
def ranks() -> Iterator[list[Heartbeat]]:
    """Two heartbeats of this process in one store."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=timedelta(seconds=10))
    found = [Heartbeat(lambda rank=rank: beat(rank), 2, ("127.0.0.1", store.port), "test") for rank in range(2)]
    deadline = time.monotonic() + 10
    while not all(met(one) for one in found):
        assert time.monotonic() < deadline
    yield found
    for one in found:
        one.stop()
    del store


def met(one: Heartbeat) -> bool:
    return len(one._ask(one._beats, 1.0) or []) == 2


def test_one_rank_reports_and_all_know(ranks: list[Heartbeat]) -> None:
    first, second = ranks
    assert first.announce("failure", Cause("the disk is full", 1).written())
    assert not second.announce("failure", Cause("another", 2).written())
    assert second.cause("lost a peer") == Cause("the disk is full", 1)
    deadline = time.monotonic() + 5
    while first.news.failure is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert first.news.failure == Cause("the disk is full", 1)


def test_a_cause_is_found_once(ranks: list[Heartbeat]) -> None:
    found = [one.cause("waited") for one in ranks]
    assert found[0].text == found[1].text
    assert sum(one.mine for one in found) == 1


def test_a_store_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    one = Heartbeat(lambda: beat(1), 2, ("127.0.0.1", 1), "test")
    monkeypatch.setattr(heartbeat, "_ANSWER", 1.0)
    assert one.cause("waited").text == (
        "the launcher at 127.0.0.1:1, through which the ranks meet, was lost or is stopped"
    )
    one.stop()


def test_the_first_signal_asks_and_a_later_one_ends() -> None:
    asked = Asked()
    assert asked.add(signal.SIGTERM, again=False)
    assert not asked.add(signal.SIGINT, again=True)
    assert not asked.at_once  # the same Ctrl-C, passed on by a launcher
    asked._since -= 1.0
    asked.add(signal.SIGTERM, again=False)
    assert not asked.at_once
    asked.add(signal.SIGINT, again=True)
    assert asked.at_once


def test_a_launcher_that_was_gone_before_the_rank_began_is_noticed(child: subprocess.Popen[bytes]) -> None:
    """Else the rank would try for ten minutes to join a store that nobody keeps."""
    child.kill()
    child.wait()
    ends: queue.Queue[Cause] = queue.Queue()
    with StopSignals() as signals:
        watchdog = Watchdog(Member(launcher=child.pid), signals, ends.put)
        found = ends.get(timeout=5)
        watchdog.close()
    assert f"its launcher (process {child.pid}) was ended in starting" in found.text


def test_signals_are_heard_by_a_thread() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGUSR1)
        assert signals.heard(1.0) == [signal.SIGUSR1]
        assert signals.heard(0.01) == []
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_second_signal_interrupts_a_program() -> None:
    with StopSignals(interrupts=True) as signals:
        signal.raise_signal(signal.SIGINT)
        signals._first -= 1.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_limits_come_from_the_predicted_step() -> None:
    assert limit_of(0, 100.0) == 2000.0
    assert limit_of(0, 0.01, here=False) == 3600.0
    assert limit_of(7.5, 100.0) == 7.5


def limits_of_groups(table: str) -> set[float]:
    """Return the limits of all process groups of this rank after a plan was applied, in seconds."""
    _, plan = plan_of(table, CONFIGS["qwen3-moe"])
    limit_collectives(timedelta(seconds=42))
    try:
        apply(plan.resolve().model, plan)
        groups = [group for group in distributed_c10d._world.pg_map if dist.get_world_size(group) > 0]
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        assert len(backends) > 3
        return {one.options._timeout.total_seconds() for one in backends}
    finally:
        limit_collectives(timedelta(seconds=60))


def test_every_group_has_the_limit_of_the_run() -> None:
    assert pool(4).run(limits_of_groups, "tp=2,dp=2,ep=2,zero=1") == [{42.0}] * 4
