"""A full disk ends a command with one message and exit code 1; what was there stays, and nothing half-written does."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.base.files import write_texts
from meshwright.errors import DiskFull
from meshwright.run.folder.checkpoint.huggingface import read_weights, write_weights
from meshwright.run.models import build
from tests.conftest import Run
from tests.run.families import CONFIGS

KIB = 1024


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: what the system then says, it says of a full disk too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Make a disk of so many KiB; needs the right to mount one."""
    place = tmp_path / "disk"
    place.mkdir()

    def mounted(kib: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(place)]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=10)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no disk can be mounted here")
        return place

    yield mounted
    subprocess.run(["umount", str(place)], check=False, capture_output=True, timeout=10)


def one_message(done: subprocess.CompletedProcess[str], file: str, reason: str = "No space left on device") -> None:
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert f"{file}: cannot be written: {reason}" in done.stderr
    assert "Traceback" not in done.stderr


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_several_texts_appear_together_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    texts = {tmp_path / "old": "new", tmp_path / "small": "a", tmp_path / "large": "b" * 4 * KIB}
    with largest_file(KIB), pytest.raises(DiskFull, match=r"large: cannot be written: File too large"):
        write_texts(texts)
    assert names(tmp_path) == ["old"]
    assert (tmp_path / "old").read_text() == "kept"
    write_texts(texts)
    assert [(tmp_path / name).read_text() for name in ("old", "small", "large")] == ["new", "a", "b" * 4 * KIB]


@pytest.mark.parametrize("limit", [2 * KIB, 20 * KIB], ids=["the first file", "a later file"])
def test_weights_that_do_not_fit_leave_no_file(limit: int, tmp_path: Path) -> None:
    """The files are of about 8 KiB but one, the embedding's, of 16."""
    model = mw.Model.from_config({**CONFIGS["llama"], "vocab_size": 256})
    with largest_file(limit), pytest.raises(DiskFull, match=r"safetensors: cannot be written: File too large"):
        write_weights(model, build(model), tmp_path / "model", shard=8 * KIB)
    assert names(tmp_path / "model") == []


def test_weights_without_room_for_their_index_leave_no_file(small_disk: Callable[[int], Path]) -> None:
    model = mw.Model.from_config(CONFIGS["llama"])
    decoder = build(model)
    for room in range(72, 400, 4):  # a page more each time, until all fits
        disk = small_disk(room)
        try:
            write_weights(model, decoder, disk / "model")
        except DiskFull as error:
            failed = error
            assert names(disk / "model") == []
            subprocess.run(["umount", str(disk)], check=True)
        else:
            break
    assert Path(failed.file).name == "model.safetensors.index.json"  # what was short of a page at last
    read_weights(model, decoder, disk / "model")


def test_a_model_stays_until_another_is_whole(tmp_path: Path) -> None:
    model = mw.Model.from_config(CONFIGS["llama"])
    write_weights(model, build(model, seed=1), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with largest_file(10 * KIB), pytest.raises(DiskFull):
        write_weights(model, build(model, seed=2), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("plan", ["dp=2", pytest.param("dp=1", marks=pytest.mark.nightly)])
def test_a_run_whose_export_does_not_fit(plan: str, small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(256)
    command = [sys.executable, "-m", "meshwright", "train", "tiny-llama", "--plan", plan, "--seq", "16", "--batch", "4"]
    command += ["--steps", "1", "--data", "synthetic", "--export", str(disk / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, cwd=disk)
    one_message(done, str(disk / "model/model-00001.safetensors"))
    assert len(done.stderr.splitlines()) == 1
    assert names(disk / "model") == []


def test_an_export_to_another_framework(meshwright: Run, small_disk: Callable[[int], Path]) -> None:
    """The first of its files fits, the second does not."""
    arguments = ["export", "tp=8", "--model", "llama3-8b", "--cluster", "8xh100", "--batch", "8", "--to", "megatron"]
    folder = small_disk(4) / "run"
    one_message(meshwright(*arguments, "-o", str(folder)), str(folder / "plan.json"))
    assert not folder.exists()


def test_a_run_that_cannot_write_its_lock(meshwright: Run, small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(4)
    (disk / "taken").write_bytes(b"x" * 4 * KIB)
    arguments = ["train", "tiny-llama", "--seq", "16", "--batch", "4", "--steps", "1", "--data", "synthetic"]
    done = meshwright(*arguments, "--plan", "dp=1", "--output", str(disk))
    said = f"error: {disk}/run.lock: the disk is full; the last whole checkpoint is kept"
    assert (done.returncode, done.stderr.splitlines()) == (1, [said])
    assert names(disk) == ["taken"]


def test_prepared_data_that_does_not_fit(meshwright: Run, small_disk: Callable[[int], Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 20 * KIB)
    disk = small_disk(64)
    done = meshwright("prepare", "a.txt", "-o", str(disk / "tokens"))
    assert (done.returncode, done.stderr.splitlines()) == (1, [f"error: {disk}/tokens: No space left on device"])
    assert names(disk) == []
