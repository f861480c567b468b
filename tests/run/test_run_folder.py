"""Runs and their folder: one at a time, and whole however a disk or a process fails."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.base.processes import this_machine
from meshwright.errors import DiskFull, InputError, TrainingFailed
from meshwright.run.folder.checkpoint import files as checkpoint_files
from meshwright.run.folder.checkpoint.checkpoint import damage, latest
from meshwright.run.folder.events import Events
from meshwright.run.folder.lock import NAME, take
from tests.run.families import CONFIGS
from tests.run.test_folder_lock import files, written
from tests.run.test_train import TINY, ended, started, steps_of
from tests.run.test_train import plan as tiny

FULL = "the disk is full; the last whole checkpoint is kept"


@pytest.fixture(autouse=True)
def without_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def plan(**short: Any) -> mw.Plan:
    job = mw.Job(mw.Model.from_config(CONFIGS["llama"]), mw.Cluster.preset("1xcpu"), 2, seq_len=16, precision="fp32")
    return mw.Plan.of({"micro_batches": 1, **short}, job)


def train(folder: Path, **options: Any) -> list[dict[str, Any]]:
    """A run so small that a checkpoint has a few hundred KiB."""
    return mw.train(plan(), output=str(folder), **{"steps": 2, "save_every": 1, **options})


def test_two_starts_at_once_leave_one_run(tmp_path: Path) -> None:
    arguments = [*TINY, "--steps", "100000", "--save-every", "1", "--output", "run", "--json"]
    both = [started(*arguments, "--plan", "dp=1", cwd=tmp_path), started(*arguments, "--plan", "dp=2", cwd=tmp_path)]
    deadline = time.monotonic() + 90
    while all(process.poll() is None for process in both) and time.monotonic() < deadline:
        time.sleep(0.1)
    loser, winner = sorted(both, key=lambda process: process.poll() is None)
    _, err = loser.communicate(timeout=10)
    assert loser.returncode == 2, err
    owner = json.loads((tmp_path / "run" / NAME).read_text())
    assert err.splitlines() == [
        f"error: run: --output: is in use by run {owner['run']} (process {owner['pid']} on {owner['host']}) "
        "(valid: another folder, or the same once that run has ended)"
    ]
    winner.send_signal(signal.SIGTERM)
    _, err = winner.communicate(timeout=60)
    assert winner.returncode == 3, err
    found, problems = latest(tmp_path / "run/checkpoints")
    assert (found is not None, problems) == (True, [])
    assert found is not None
    assert json.loads((found.path / "manifest.json").read_text())["run"] == owner["run"]
    assert NAME not in files(tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in steps_of(events)] == list(range(1, found.step + 1))


def test_a_killed_run_is_taken_over_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    common = [*TINY, "--save-every", "1", "--output", str(run), "--decay", "constant"]
    process = started(*common, "--steps", "100000", "--plan", "dp=1", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not list(run.glob("checkpoints/step-0000000[3-9].*.part")) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert NAME in files(run)
    found, _ = latest(run / "checkpoints")
    assert found is not None
    mw.train(tiny(), steps=found.step + 1, save_every=1, output=str(run), decay="constant", resume=True)
    assert capfd.readouterr().err == ""
    again, problems = latest(run / "checkpoints")
    assert again is not None
    assert (again.step, problems) == (found.step + 1, [])
    assert not list(run.glob("checkpoints/*.part"))
    assert NAME not in files(run)


def test_a_run_that_lost_its_folder_commits_nothing(tmp_path: Path) -> None:
    def steal(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 2:
            (tmp_path / "run" / NAME).unlink()
            written(tmp_path / "run")

    with pytest.raises(TrainingFailed, match=r"now held by run beef \(process 7 on far\); nothing more is written"):
        train(tmp_path / "run", steps=4, tell=steal)
    assert files(tmp_path / "run/checkpoints") <= {"step-00000001"}
    assert json.loads((tmp_path / "run" / NAME).read_text())["run"] == "beef"


def test_a_run_that_lost_its_folder_ends_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before its next checkpoint, of which there is none here."""
    monkeypatch.setattr("meshwright.run.folder.hold.take", partial(take, renew=0.05))

    def steal(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 2:
            (tmp_path / "run" / NAME).unlink()
            written(tmp_path / "run")
        assert event["event"] != "step" or event["step"] < 2000

    with pytest.raises(TrainingFailed, match="now held by run beef"):
        train(tmp_path / "run", steps=100000, save_every=0, tell=steal)
    assert files(tmp_path / "run/checkpoints") == set()


def test_an_export_to_a_full_disk_is_named(small_disk: Path) -> None:
    room = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(b"x" * (room.f_bavail - 3) * room.f_frsize)
    with pytest.raises(DiskFull, match=r"model-00001.safetensors: cannot be written: No space left on device"):
        mw.train(plan(), steps=1, export=str(small_disk / "model"))
    assert files(small_disk / "model") == set()


def test_a_failed_run_waits_for_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after a save fails while it is being written: it becomes whole all the same."""
    commit = checkpoint_files.write_manifest
    monkeypatch.setattr(
        "meshwright.run.folder.checkpoint.checkpoint.write_manifest", lambda *a: (time.sleep(0.5), commit(*a))
    )

    def fail(event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":
            raise TrainingFailed("a reason of its own")

    with pytest.raises(TrainingFailed, match="of its own"):
        train(tmp_path, tell=fail)
    assert files(tmp_path / "checkpoints") == {"step-00000001"}
    assert damage(tmp_path / "checkpoints/step-00000001") == ""
    assert NAME not in files(tmp_path)


def test_a_refused_run_leaves_the_folder_as_it_is(tmp_path: Path) -> None:
    train(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    lock = written(tmp_path, pid=os.getpid(), started="", machine=this_machine(), host="here")
    with pytest.raises(InputError, match="in use by run beef"):
        train(tmp_path, steps=4, resume=True)
    lock.unlink()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before


def test_leftovers_of_dead_runs_go(tmp_path: Path) -> None:
    train(tmp_path)
    kept = tmp_path / "checkpoints"
    (kept / "step-00000009.beef.part").mkdir()
    (kept / "step-00000009.beef.part/__0_0.distcp").write_text("half")
    (kept / "step-00000002").rename(kept / "step-00000002.old")  # cut short between two renames
    (kept / "step-00000001.old").mkdir()
    events = train(tmp_path, steps=3, resume=True, keep=9)
    assert next(event["step"] for event in events if event["event"] == "resumed") == 2
    assert files(kept) == {"step-00000001", "step-00000002", "step-00000003"}


def test_a_whole_checkpoint_stays_until_its_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path)
    whole = tmp_path / "checkpoints/step-00000002"
    part = checkpoint_files.part_of(whole.parent, 2, "cafe")
    part.mkdir()
    rename = Path.rename

    def cut_short(path: Path, target: Path) -> Path:
        if path == part:
            raise OSError("power is lost")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", cut_short)
        with pytest.raises(OSError, match="power"):
            checkpoint_files.put_in_place(part, 2)
    checkpoint_files.sweep(whole.parent)
    assert damage(whole) == ""


def test_a_cut_line_of_events_stays_alone(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "start", "step": 0}\n{"event": "st')
    events = Events(str(tmp_path), 0)
    events.say("start", step=1)
    events.close()
    again = Events(str(tmp_path), 0)
    again.say("end", step=2)
    again.close()
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(lines[row])["step"] for row in (0, 2, 3)] == [0, 1, 2]
    assert (lines[1], len(lines)) == ('{"event": "st', 4)


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = steps_of(train(tmp_path))
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    found = read.Scalars("step/loss")
    assert [scalar.step for scalar in found] == [1, 2]
    assert [scalar.value for scalar in found] == pytest.approx([event["loss"] for event in events], rel=1e-6)
    assert set(read.Tags()["scalars"]) >= {"step/grad_norm", "step/lr", "step/mfu", "step/tokens_per_second"}


def test_a_disk_that_is_full_at_any_write_is_named(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With ever more pages left, another write is the one that fails; none leaves a traceback."""
    said: set[str] = set()
    for pages in (0, 1, 2, 3, 4, 5, 6, 10, 20, 40, 80, 160):
        filler = small_disk / "filler"
        room = os.statvfs(small_disk)
        filler.write_bytes(b"x" * (room.f_bavail - pages) * room.f_frsize)
        try:
            train(small_disk / "run", profile=str(small_disk / "run"), steps=5)
        except TrainingFailed as error:
            message = str(error)
        else:
            raise AssertionError(f"{pages} pages were enough")
        assert "disk" in message
        said.add(Path(message.partition(":")[0]).relative_to(small_disk / "run").parts[0])
        assert latest(small_disk / "run/checkpoints")[1] == []
        assert not [path for path in (small_disk / "run").rglob("*") if path.name == NAME or path.suffix == ".part"]
        filler.unlink()
        subprocess.run(["rm", "-rf", str(small_disk / "run")], check=True)
    assert said >= {NAME, "plan.json", "events.jsonl", "tensorboard", "checkpoints"}
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert "Exception" not in err


def nearly_filled(disk: Path) -> Path:
    """A run with a checkpoint, and room for two thirds of another."""
    train(disk / "run", steps=1)
    size = sum(path.stat().st_size for path in (disk / "run/checkpoints").rglob("*"))
    room = os.statvfs(disk)
    (disk / "filler").write_bytes(b"x" * (room.f_bavail * room.f_frsize - size * 2 // 3))
    return disk / "run"


def only_the_first_is_there(run: Path) -> bool:
    found, problems = latest(run / "checkpoints")
    return bool(found and found.step == 1) and not problems and files(run / "checkpoints") == {"step-00000001"}


def test_a_disk_that_fills_while_saving_keeps_the_last(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = nearly_filled(small_disk)
    with pytest.raises(TrainingFailed, match=rf"\.distcp: {FULL}"):
        train(run, steps=3, resume=True)
    assert capfd.readouterr().err == ""
    assert only_the_first_is_there(run)


def test_two_processes_say_once_that_a_disk_fills(small_disk: Path, tmp_path: Path) -> None:
    run = nearly_filled(small_disk)
    two = mw.Cluster.preset("2xcpu")
    job = mw.Job(mw.Model.from_config(CONFIGS["llama"]), two, 2, seq_len=16, precision="fp32")
    mw.Plan.of({"dp": 2, "micro_batches": 1}, job).save(tmp_path / "plan.json")
    arguments = ["--plan", "plan.json", "--data", "synthetic", "--steps", "3", "--save-every", "1", "--resume"]
    code, _, err = ended(*arguments, "--output", str(run), cwd=tmp_path)
    assert code == 1, err
    assert len(err.splitlines()) == 1, err
    assert FULL in err
    assert only_the_first_is_there(run)


def test_a_file_that_may_not_grow_ends_a_run_too(tmp_path: Path) -> None:
    """Without root: the limit of a file's size is another way for a disk to refuse."""
    limit = (60_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    arguments = [*TINY, "--steps", "2", "--save-every", "1", "--plan", "dp=2", "--output", "run"]
    code, _, err = ended(*arguments, cwd=tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    assert code == 1, err
    assert len(err.splitlines()) == 1, err
    assert ".distcp: cannot be written: File too large; the last whole checkpoint is kept" in err
    assert files(tmp_path / "run/checkpoints") == set()
