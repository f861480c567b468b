"""How runs end: any signal to any process, under every launcher; one cause, one checkpoint, one table of exit codes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import FAILED, STOPPED
from tests.launchers import ends
from tests.packages import installed

TERM, INT, USR1, KILL, STOP = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL, signal.SIGSTOP
ASKED = (TERM, INT, USR1)
GONE = 30.0  # seconds after which nothing is left


def check(running: ends.Running, number: int, part: str) -> None:
    """Send a signal and hold the end against the table in docs/train.md."""
    running.begin()
    before = running.saved()
    running.send(number, part)
    running.gone(GONE + (ends.WAIT if number == STOP else 0))
    codes, said = running.codes(), running.messages()
    if number == KILL and part == "launcher" and running.silent:
        return  # Ray ends its actors with their driver, often before they can say why
    # Without the store, which ends with the first agent, nodes cannot agree on who reports: each says it once.
    keeper = number == KILL and part == "launcher" and len(running.launchers) == 2
    assert len(said) == (2 if keeper else 1), said
    asks = number in ASKED or (number == STOP and part in ("launcher", "agent"))
    if asks:
        assert running.saved() > before
        assert "stopping after this step" in said[0]
        assert (signal.Signals(number).name if number in ASKED else "the launcher is stopped") in said[0]
    elif part in ("launcher", "agent"):
        assert "was ended" in said[0] or "was lost" in said[0]
    else:
        rank = 0 if part == "first" else 1
        assert f"rank {rank} (" in said[0]
        assert f"process {running.parts[part]}" in said[0]
        assert {KILL: "was ended", STOP: "is stopped"}[signal.Signals(number)] in said[0]
        assert "step" in said[0]  # the operation
    for name, code in zip(("launcher", "agent"), codes, strict=False):
        lost = number in (KILL, STOP) and part == name
        assert code == (-KILL if lost else STOPPED if asks else FAILED), (name, codes, said)


def nightly(*cases: Any) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.nightly) for case in cases]


def every(*parts: str) -> list[tuple[signal.Signals, str]]:
    return [(number, part) for number in (*ASKED, KILL, STOP) for part in parts]


LOCAL = [(TERM, "last"), (STOP, "first")]
TORCHRUN = [(TERM, "agent"), (KILL, "last")]


@pytest.mark.parametrize(
    ("number", "part"), LOCAL + nightly(*(one for one in every("launcher", "first", "last") if one not in LOCAL))
)
def test_local(number: signal.Signals, part: str, tmp_path: Path) -> None:
    with ends.local(tmp_path) as running:
        check(running, number, part)


@pytest.mark.parametrize(
    ("number", "part"),
    TORCHRUN + nightly(*(one for one in every("launcher", "agent", "first", "last") if one not in TORCHRUN)),
)
def test_torchrun(number: signal.Signals, part: str, tmp_path: Path) -> None:
    with ends.torchrun(tmp_path) as running:
        check(running, number, part)


@pytest.mark.parametrize(("number", "part"), nightly(*every("first", "last")))
def test_slurm(number: signal.Signals, part: str, tmp_path: Path) -> None:
    with ends.slurm(tmp_path) as running:
        check(running, number, part)
        code = int((tmp_path / "state/code").read_text())
        assert code in ((STOPPED,) if number in ASKED else (FAILED, KILL))


@pytest.mark.nightly
def test_slurm_cancels(tmp_path: Path) -> None:
    """`scancel` sends TERM to all tasks: the job is not put back, and is no success."""
    with ends.slurm(tmp_path) as running:
        running.begin()
        for part in ("first", "last"):
            running.send(TERM, part)
        running.gone(GONE)
        assert (tmp_path / "state/code").read_text() == str(STOPPED)
        assert running.saved() > 0
        assert len(running.messages()) == 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Two nodes of one core; the cluster's address."""
    if not installed("ray"):
        pytest.skip("ray is not installed")
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ends.environment() | {"RAY_USAGE_STATS_ENABLED": "0"}).items():
            patch.setenv(name, value)
        found = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
        found.add_node(**small)
        yield found.address
        found.shutdown()


@pytest.mark.parametrize(("number", "part"), nightly(*every("launcher", "first", "last")))
def test_ray(number: signal.Signals, part: str, cluster: str, tmp_path: Path) -> None:
    with ends.ray(tmp_path, cluster) as running:
        check(running, number, part)
        assert "raylet" not in (tmp_path / "driver.out").read_text()
