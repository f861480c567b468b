"""Slurm's scripts: the shell's grammar, Slurm's published options, and a run through a small Slurm of our own."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.errors import InputError
from meshwright.launchers import slurm
from tests.conftest import ROOT, Run
from tests.launchers import fake_slurm
from tests.launchers.plans import losses_in, losses_of_one_process, request, using, written

SITE = slurm.Slurm(account="lab", partitions=["a100", "v100"], constraints=["ib"], time="04:00:00")
PLANS = {
    "one node": ("1x8xh100", list(range(8))),
    "part of the last node": ("2x8xh100", list(range(12))),
    "two kinds": ("2x8xa100-80gb+4x8xv100-32gb", list(range(48))),
    "processors": ("2x2xcpu", list(range(4))),
}


def script(case: str, site: slurm.Slurm = slurm.Slurm(), **run: str) -> str:  # noqa: B008
    return slurm.script(request(using(*PLANS[case]), **run), site)


@pytest.mark.parametrize("output", ["", "run", "a folder/run's"])
@pytest.mark.parametrize("case", PLANS)
def test_bash_and_sbatch_read_it(case: str, output: str) -> None:
    site = SITE if case == "two kinds" else slurm.Slurm(partitions=["gpu"])
    text = script(case, site, output=output)
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    components = fake_slurm.directives(text)  # leaves on an option that the manual does not have
    assert components[0]["job-name"] == "train-tiny-llama"
    assert components[0]["chdir"] == os.getcwd()


def test_kinds_of_nodes_are_components() -> None:
    first, second = fake_slurm.directives(script("two kinds", SITE, output="run"))
    sizes = ("nodes", "ntasks-per-node", "gpus-per-node", "partition", "constraint")
    assert [first[name] for name in sizes] == ["2", "8", "8", "a100", "ib"]
    assert [second[name] for name in sizes] == ["4", "8", "8", "v100", "ib"]
    assert (first["account"], first["time"], first["signal"]) == ("lab", "04:00:00", "B:USR1@300")
    assert "signal" not in second  # Slurm hands it on


def test_idle_devices_are_hidden_and_processors_are_no_gpus() -> None:
    text = script("part of the last node")
    whole, part = fake_slurm.directives(text)
    assert (whole["gpus-per-node"], whole["ntasks-per-node"]) == ("8", "8")
    assert (part["gpus-per-node"], part["ntasks-per-node"]) == ("8", "4")
    assert text.count("CUDA_VISIBLE_DEVICES=0,1,2,3") == 1
    assert "gpu" not in script("processors")


def test_without_an_output_nothing_is_put_back_into_the_queue() -> None:
    text = script("one node")
    assert "requeue" not in text
    assert "auto-resume" not in text


def test_as_many_partitions_as_groups() -> None:
    with pytest.raises(InputError, match="--partition: was given 3 times for 2 groups"):
        script("two kinds", slurm.Slurm(partitions=["a", "b", "c"]))


def until(what: str, found: object, seconds: float = 60) -> None:
    """Wait for something that a job does."""
    deadline = time.monotonic() + seconds
    while not found():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_a_job_runs_is_put_back_and_goes_on(tmp_path: Path, meshwright: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitted through sbatch, on two unlike nodes, told in the middle that its time is over."""
    tools, state, run = tmp_path / "bin", tmp_path / "state", tmp_path / "run"
    for folder in (tools, state):
        folder.mkdir()
    fake_slurm.install(tools)
    monkeypatch.setenv("FAKE_SLURM", str(state))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    done = meshwright("launch", written(tmp_path), "--on", "slurm", "--steps", "20", "-o", "run", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["submitted"] == fake_slurm.JOB
    assert [(r["rank"], r["device"], r["group"], r["local"]) for r in facts["ranks"]] == [
        (0, 0, 0, 0),
        (1, 1, 0, 1),
        (2, 3, 1, 1),
    ]

    def started() -> int:
        return len(losses_in(run)) if (run / "events.jsonl").exists() else 0

    until("three steps", lambda: started() >= 3)
    subprocess.run([str(tools / "scancel"), "--batch", "--signal=USR1", fake_slurm.JOB], check=True)
    until("the end", (state / "code").exists)
    log = (run / "logs" / f"{fake_slurm.JOB}.log").read_text()
    assert (state / "code").read_text() == "0", log
    assert len(list(state.glob("started-again-*"))) == 1
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    order = [event for event in events if event in ("start", "stopped", "resumed", "end")]
    assert order == ["start", "stopped", "resumed", "start", "end"]
    assert losses_in(run) == pytest.approx(losses_of_one_process(20), rel=1e-3)
    assert {path.name for path in (run / "logs").iterdir()} == {"7.log", "7-127.0.0.1.log", "7-127.0.0.2.log"}


def test_what_sbatch_refuses_is_said(tmp_path: Path, meshwright: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'error: invalid partition' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    done = meshwright("launch", written(tmp_path), "--on", "slurm", "--steps", "3")
    assert done.returncode == 1
    assert done.stderr == "error: sbatch did not take the job: error: invalid partition\n"


def test_a_finished_run_that_is_started_again_has_nothing_to_do(tmp_path: Path) -> None:
    job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("1xcpu"), 4, seq_len=32, precision="fp32")
    plan = mw.Plan.of({"micro_batches": 2}, job)
    folder = str(tmp_path / "run")
    (tmp_path / "run/checkpoints/step-00000001.part").mkdir(parents=True)  # a first save that was cut off
    assert mw.train(plan, steps=2, output=folder, auto_resume=True)[-1]["event"] == "end"
    again = [event["event"] for event in mw.train(plan, steps=2, output=folder, auto_resume=True)]
    assert again == ["resumed", "start", "end"]
    with pytest.raises(InputError, match="--auto-resume: needs the run's folder"):
        mw.train(plan, steps=2, auto_resume=True)
