"""The verb `launch`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_bad_input import mistake
from tests.conftest import Run
from tests.launchers.plans import written

HUNDREDS = {"model": "llama3-8b", "cluster": "2x8xh100", "global_batch": 64, "seq_len": 2048, "tp": 8}


@pytest.fixture
def plan(tmp_path: Path) -> str:
    return written(tmp_path, HUNDREDS)


def test_a_dry_run_prints_and_leaves_nothing(meshwright: Run, plan: str, tmp_path: Path) -> None:
    for options in (["slurm"], ["torchrun", "--address", "n1"], ["ray"], ["local"], ["kubernetes", "--image", "i"]):
        done = meshwright("launch", plan, "--dry-run", "--steps", "5", "--on", *options)
        assert done.returncode == 0, done.stderr
        assert "# ranks 0-15: 2 nodes of 8 h100" in done.stdout
        assert "meshwright train --plan" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == [plan]


def test_a_script_is_written_with_the_folder_of_its_logs(meshwright: Run, plan: str, tmp_path: Path) -> None:
    done = meshwright("launch", plan, "--on", "slurm", "--steps", "5", "-o", "run", "--write", "job.sbatch")
    assert done.stdout == "written to job.sbatch; submit it with: sbatch job.sbatch\n"
    assert (tmp_path / "job.sbatch").read_text().startswith("#!/bin/bash\n")
    assert (tmp_path / "run/logs").is_dir()


def test_facts_for_programs(meshwright: Run, plan: str) -> None:
    facts = json.loads(meshwright("launch", plan, "--on", "slurm", "--steps", "5", "--dry-run", "--json").stdout)
    assert facts["ranks"][9] == {"rank": 9, "device": 9, "group": 0, "node": 1, "local": 1}
    assert (facts["on"], facts["submitted"], facts["file"]) == ("slurm", "", "")
    assert "#SBATCH" in facts["text"]


def test_it_never_imports_torch(meshwright: Run, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    for on in ("slurm", "ray", "local"):
        done = meshwright("launch", plan, "--on", on, "--steps", "5", "--dry-run")
        assert done.returncode == 0, done.stderr


def test_here_it_trains_as_train_does(meshwright: Run, tmp_path: Path) -> None:
    small = {"model": "tiny-llama", "cluster": "1xcpu", "global_batch": 4, "seq_len": 32, "precision": "fp32"}
    options = ["--steps", "2", "--seed", "5", "--json"]
    done = meshwright("launch", written(tmp_path, small), "--on", "local", *options)
    assert done.returncode == 0, done.stderr
    same = meshwright("train", "--plan", "plan.json", *options)
    losses = [[json.loads(line)["loss"] for line in each.stdout.splitlines()] for each in (done, same)]
    assert len(losses[0]) == 2
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--on", "slurm"]),
        (["--on", "lsf"], ["--on", "slurm"]),
        (["--on", "slurm", "--image", "i"], ["--image", "is for kubernetes, not for slurm"]),
        (["--on", "kubernetes", "--partition", "p"], ["--partition", "is for slurm"]),
        (["--on", "local", "--address", "a"], ["--address", "torchrun and ray"]),
        (["--on", "kubernetes"], ["--image", "is needed"]),
        (["--on", "torchrun"], ["--address", "several nodes"]),
        (["--on", "slurm", "--name", "No"], ["--name", "'No'"]),
        (["--on", "slurm", "--write", "no/such/file"], ["--write", "no folder 'no/such'"]),
        (["--on", "slurm", "--write", "x", "--dry-run"], ["--dry-run"]),
        (["--on", "slurm", "--data", "nowhere"], ["nowhere", "no such file or folder"]),
        (["--on", "slurm", "--resume"], ["--resume", "needs the run's folder"]),
        (["--on", "slurm", "--partition", "a", "--partition", "b"], ["--partition", "2 times for 1 group"]),
        (["--on", "slurm", "--time", "soon"], ["--time", "soon"]),
        (["--on", "slurm", "--time", "5"], ["--time", "too short", "10 minutes"]),
        (["--on", "slurm", "--partition", "a\n#SBATCH --uid=0"], ["--partition"]),
        (["--on", "slurm", "-o", "plan.json"], ["plan.json", "is a file"]),
    ],
)
def test_mistakes(meshwright: Run, plan: str, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    mistake(meshwright("launch", plan, "--steps", "5", *arguments), *words)
    assert [path.name for path in tmp_path.iterdir()] == [plan]


def test_plans_that_no_process_could_read(meshwright: Run, tmp_path: Path) -> None:
    mistake(meshwright("launch", "nowhere.json", "--on", "slurm", "--steps", "5"), "nowhere.json", "no such file")
    mistake(meshwright("launch", "tp=2", "--on", "slurm", "--steps", "5"), "model")
    mistake(
        meshwright("launch", "-", "--on", "slurm", "--steps", "5", input=json.dumps(HUNDREDS)), "PLAN", "every process"
    )
    (tmp_path / "plan.json").write_text('{"tp": 8}')
    mistake(meshwright("launch", "plan.json", "--on", "slurm", "--steps", "5"), "plan.json", "model")


@pytest.mark.parametrize(("on", "tool"), [("slurm", "sbatch"), ("kubernetes", "kubectl")])
def test_a_tool_that_is_not_here(
    meshwright: Run, plan: str, on: str, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    options = ["--image", "i"] if on == "kubernetes" else []
    done = meshwright("launch", plan, "--on", on, "--steps", "5", *options)
    mistake(done, f"--on {on}", f"{tool} is not on this machine", "--dry-run or --write FILE")


def test_a_plan_that_does_not_fit_is_not_submitted(meshwright: Run, tmp_path: Path) -> None:
    large = {"model": "llama3-70b", "cluster": "1x8xh100", "global_batch": 8, "seq_len": 2048, "dp": 8, "zero": 0}
    done = meshwright("launch", written(tmp_path, large), "--on", "slurm", "--steps", "5", "--dry-run")
    assert done.returncode == 1
    assert "short" in done.stderr or "does not fit" in done.stderr
