"""The lock of a run's folder: who is refused, who takes over, and who notices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.base.processes import started_at, this_machine
from meshwright.errors import InputError, TrainingFailed
from meshwright.run.folder.lock import NAME, FolderLock, Owner, refuse_if_held, take

FOREVER = 1000.0  # a lease that no test waits for


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def written(folder: Path, count: int = 0, name: str = NAME, **facts: Any) -> Path:
    """A lock as another process would write it; by hand, so that its form is tested too."""
    table = {"format": "meshwright-lock", "version": 1, "run": "beef", "host": "far", "machine": "elsewhere",
             "pid": 7, "started": "1", **facts, "renewed": f"{count:012}"}  # fmt: skip
    (folder / name).write_text(json.dumps(table))
    return folder / name


def of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    return {"machine": this_machine(), "pid": process.pid, "started": started_at(process.pid), "host": "here"}


def owner_in(folder: Path) -> str:
    return str(json.loads((folder / NAME).read_text())["run"])


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_a_living_process_is_named(state: str, sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    if state == "stopped":
        sleeper.send_signal(signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)
    written(tmp_path, **of(sleeper))
    named = rf"--output: is in use by run beef \(process {sleeper.pid} on here\)"
    for attempt in (lambda: take(tmp_path, lease=0.01), lambda: refuse_if_held(tmp_path)):
        with pytest.raises(InputError, match=named) as found:
            attempt()
        assert ("stopped" in str(found.value)) == (state == "stopped")
    assert owner_in(tmp_path) == "beef"


@pytest.mark.parametrize("end", ["reaped", "a zombie", "its number is another's"])
def test_a_dead_process_is_replaced_at_once(end: str, sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    written(tmp_path, **of(sleeper))
    if end == "its number is another's":
        written(tmp_path, **of(sleeper) | {"started": "1"})
    else:
        sleeper.kill()
        if end == "reaped":
            sleeper.wait()
        else:
            os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    refuse_if_held(tmp_path)
    lock = take(tmp_path, lease=FOREVER)
    assert owner_in(tmp_path) == lock.owner.run != "beef"
    lock.release()
    assert files(tmp_path) == set()


def test_a_foreign_run_that_renews_is_named(tmp_path: Path) -> None:
    written(tmp_path)
    threading.Timer(0.3, written, (tmp_path, 1)).start()
    begun = time.monotonic()
    with pytest.raises(InputError, match=r"is in use by run beef \(process 7 on far\)"):
        take(tmp_path, lease=30.0)
    assert time.monotonic() - begun < 10


def test_a_foreign_run_that_is_silent_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path)
    refuse_if_held(tmp_path)  # it cannot be known yet
    begun = time.monotonic()
    lock = take(tmp_path, lease=0.5)
    assert time.monotonic() - begun >= 0.5
    assert owner_in(tmp_path) == lock.owner.run
    assert capsys.readouterr().err.count("run beef (process 7 on far); waiting 0.5 s") == 1
    lock.release()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b"[]", b'{"run": 3}', b'{"run": "../x"}', b"9" * 9000])
def test_an_unreadable_lock_is_of_an_unknown_run(content: bytes, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(content)
    begun = time.monotonic()
    lock = take(tmp_path, lease=0.2)
    assert time.monotonic() - begun >= 0.2
    assert (owner_in(tmp_path), files(tmp_path)) == (lock.owner.run, {NAME})
    lock.release()


def test_a_half_written_lock_that_becomes_whole_is_refused(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("{")
    threading.Timer(0.2, written, (tmp_path, 0)).start()
    threading.Timer(1.2, written, (tmp_path, 1)).start()
    with pytest.raises(InputError, match="in use by run beef"):
        take(tmp_path, lease=2.0)


def test_of_many_takers_one_wins(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    dead = of(sleeper)
    sleeper.kill()
    sleeper.wait()
    for attempt in range(30):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        if attempt % 3:
            written(folder, **dead)
        if attempt % 3 == 2:  # the last one died while it took over
            written(folder, name=f"{NAME}.beef", **dead | {"run": "dead"})
        won: list[FolderLock] = []
        refused: list[str] = []
        together = threading.Barrier(6)

        def taker(
            folder: Path = folder, won: list[FolderLock] = won, refused: list[str] = refused,
            together: threading.Barrier = together,
        ) -> None:  # fmt: skip
            together.wait()
            try:
                won.append(take(folder, lease=FOREVER))
            except InputError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=taker) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert len(refused) == 5
        assert all(f"(process {os.getpid()} on" in text for text in refused)
        assert files(folder) == {NAME}
        won[0].release()
        assert files(folder) == set()


def test_an_owner_that_lost_its_folder_notices(tmp_path: Path) -> None:
    lock = take(tmp_path, renew=0.05)
    lock.check()
    other = tmp_path / "other"
    other.mkdir()
    os.replace(written(other), tmp_path / NAME)
    before = (tmp_path / NAME).read_bytes()
    deadline = time.monotonic() + 10
    while not lock.lost() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lock.lost()
    with pytest.raises(TrainingFailed, match=r"is now held by run beef \(process 7 on far\)"):
        lock.check()
    lock.release()
    assert (tmp_path / NAME).read_bytes() == before  # neither renewals nor the release touch another's lock


def test_an_owner_notices_before_it_commits(tmp_path: Path) -> None:
    lock = take(tmp_path, renew=FOREVER)
    (tmp_path / NAME).unlink()
    with pytest.raises(TrainingFailed, match="the lock was removed"):
        lock.check()
    lock.release()
    with pytest.raises(TrainingFailed, match="nothing more is written there"):
        lock.check()


def test_a_late_owner_proves_that_it_holds(tmp_path: Path) -> None:
    """After its lease it renews and waits for one who may just be taking over."""
    lock = take(tmp_path, lease=0.01, renew=0.6)
    time.sleep(0.05)
    before, begun = (tmp_path / NAME).read_bytes(), time.monotonic()
    lock.check()
    assert time.monotonic() - begun >= 0.6
    assert (tmp_path / NAME).read_bytes() != before
    time.sleep(0.05)
    other = tmp_path / "other"
    other.mkdir()
    threading.Timer(0.3, os.replace, (written(other), tmp_path / NAME)).start()
    with pytest.raises(TrainingFailed, match="run beef"):
        lock.check()
    lock.release()
    assert owner_in(tmp_path) == "beef"


def test_renewals_change_the_lock_and_keep_its_length(tmp_path: Path) -> None:
    lock = take(tmp_path, renew=0.02)
    first = (tmp_path / NAME).read_bytes()
    deadline = time.monotonic() + 10
    while (tmp_path / NAME).read_bytes() == first and time.monotonic() < deadline:
        time.sleep(0.01)
    again = (tmp_path / NAME).read_bytes()
    assert again != first
    assert len(again) == len(first)
    assert json.loads(again)["run"] == json.loads(first)["run"]
    lock.release()


def test_an_owner_says_who_it_is() -> None:
    mine = Owner.here()
    assert mine.seen
    assert mine.state() in "RSD"
    assert mine.run != Owner.here().run
