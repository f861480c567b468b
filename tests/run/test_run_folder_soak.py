"""Sixty random accidents: pairs of starts into one folder, kills at any time, resumes under other plans."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.run.folder.checkpoint.checkpoint import Checkpoints, Found, damage, latest
from meshwright.run.folder.checkpoint.files import names
from meshwright.run.optimizers.choose import optimizer_for
from meshwright.run.parallel.apply import apply
from tests.run.families import CONFIGS
from tests.run.test_train import listed, started, steps_of

STEPS = 60
PLANS = ["dp=1", "dp=2", "tp=2", "pp=2", "dp=2,zero=3", "dp=3", "dp=2,tp=2", "pp=2,dp=2", "tp=4"]
FOLDERS, ACCIDENTS = 15, 4  # of each folder
_ENDED = 240.0  # seconds that processes without a launcher get to end, on a machine that is busy with others


def planned(short: str) -> mw.Plan:
    table = {name: int(value) for name, value in (item.split("=") for item in short.split(","))}
    world = table.get("dp", 1) * table.get("tp", 1) * table.get("pp", 1)
    job = mw.Job(
        mw.Model.from_config(CONFIGS["llama"]), mw.Cluster.preset(f"{world}xcpu"), 12, seq_len=16, precision="fp32"
    )
    return mw.Plan.of({"micro_batches": 2, **table}, job)


def start(folder: Path, short: str) -> subprocess.Popen[str]:
    file = folder / f"{short}.json"
    planned(short).save(file)
    arguments = ["--plan", str(file), "--data", "synthetic", "--steps", str(STEPS), "--decay", "constant"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return started(
        *arguments, "--save-every", "1", "--auto-resume", "--output", str(folder / "run"), "--json", env=environment
    )


def descendants(roots: list[int]) -> list[int]:
    """Processes and all that they have started."""
    found, rows = list(roots), listed()
    for pid in found:
        found += [int(own) for own, parent, _ in rows if parent == str(pid)]
    return found


def accident(folder: Path, draw: random.Random) -> tuple[list[int], list[str]]:
    """Start one run or two at once, and kill one of their processes, mostly while it saves."""
    both = [start(folder, draw.choice(PLANS)) for _ in range(draw.choice([1, 2, 2]))]
    saves, patient, seen = draw.randint(1, 8), draw.random() < 0.5, set()
    until = time.monotonic() + (draw.uniform(0.5, 12.0) if draw.random() < 0.3 else 60.0)
    while time.monotonic() < until and any(process.poll() is None for process in both):
        meet = patient and len(both) == 2 and all(process.poll() is None for process in both)
        if len(seen) >= saves and not meet:  # both are there until one is refused
            break
        seen |= {path.name for path in (folder / "run/checkpoints").glob("*.part")}
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.02))
    everyone = descendants([process.pid for process in both if process.poll() is None])
    if everyone:
        with suppress(ProcessLookupError):
            os.kill(draw.choice(everyone), signal.SIGKILL)
    time.sleep(draw.choice([0.0, 0.5]))
    for process in both:  # who is left is ended as well, by a launcher's death
        process.kill()
    said = [process.communicate(timeout=_ENDED)[1] for process in both]
    until = time.monotonic() + _ENDED
    while time.monotonic() < until and {int(row[0]) for row in listed()} & set(everyone):
        time.sleep(0.1)
    assert not {int(row[0]) for row in listed()} & set(everyone)
    return [process.returncode for process in both], said


def loads(path: Path) -> int:
    """The step of a checkpoint that is called whole, once it has been read."""
    plan = planned("dp=1")
    part = apply(plan.resolve().model, plan, seed=0)
    manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    Checkpoints(path.parent).load(
        Found(path, manifest["step"], manifest["facts"]), part, optimizer_for("adamw", part, 1e-3, 0.1)
    )
    return int(manifest["step"])


@pytest.mark.nightly
def test_sixty_accidents_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    whole = [event["loss"] for event in steps_of(mw.train(planned("dp=1"), steps=STEPS, decay="constant"))]
    codes: list[int] = []
    for number in range(FOLDERS):
        folder, draw = tmp_path / str(number), random.Random(number)
        folder.mkdir()
        before = 0
        for _ in range(ACCIDENTS):
            found, said = accident(folder, draw)
            codes += found
            for code, text in zip(found, said, strict=True):  # who was not killed ends with a message at most
                assert code in (0, 1, 2, -signal.SIGKILL), text
                assert code == -signal.SIGKILL or "Traceback" not in text, text
            called = [path for path in names(folder / "run/checkpoints") if not damage(path)]
            assert [loads(path) for path in called] == [int(path.name[5:]) for path in called]
            newest, _ = latest(folder / "run/checkpoints")
            assert (newest.step if newest else 0) >= before  # nothing that was whole is lost
            before = newest.step if newest else 0
        print(number, "at step", before, "codes", codes[-8:], flush=True)  # noqa: T201
        events = mw.train(planned("dp=1"), steps=STEPS, decay="constant", output=str(folder / "run"), auto_resume=True)
        assert [event["loss"] for event in steps_of(events)] == pytest.approx(whole[before:], rel=1e-6)
        assert not list((folder / "run/checkpoints").glob("*.part"))
    assert codes.count(2) > 5  # refused by name
