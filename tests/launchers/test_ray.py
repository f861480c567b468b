"""Training on a real cluster of Ray: nodes are processes of this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.errors import InputError, MeshwrightError, TrainingFailed
from meshwright.launchers.launch import Where, requested
from meshwright.launchers.ray import driver
from meshwright.run.folder.checkpoint.checkpoint import latest
from meshwright.run.options import Training
from meshwright.traces.page.document import document
from tests.conftest import ROOT
from tests.launchers.plans import UNLIKE, losses_of_one_process, request, using, written
from tests.packages import installed

if not installed("ray"):
    pytest.skip("ray is not installed", allow_module_level=True)

import ray

SMALL = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Two nodes of two cores; its address."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        found = Cluster(initialize_head=True, head_node_args={**SMALL, "include_dashboard": False})
        found.add_node(**SMALL)
        yield found.address
        found.shutdown()


def train(address: str, table: dict[str, Any], room: float = 60, **run: Any) -> list[dict[str, Any]]:
    plan = mw.Plan.of(table)
    asked, promised = requested(plan, "plan.json", Training(**run), Where("ray"))
    events: list[dict[str, Any]] = []
    driver.train(asked, promised, events.append, address=address, room=room)
    return events


def test_three_actors_on_two_nodes_find_the_losses_of_one_process(cluster: str, tmp_path: Path) -> None:
    events = train(cluster, UNLIKE, steps=4, output=str(tmp_path / "run"))
    assert [event["loss"] for event in events if event["event"] == "step"] == pytest.approx(
        losses_of_one_process(4), rel=1e-4
    )
    assert [event["event"] for event in events if event["event"] != "step"] == ["start", "checkpoint", "end"]
    assert {path.name for path in (tmp_path / "run").glob("events*")} == {
        "events.jsonl",
        "events-1.jsonl",
        "events-2.jsonl",
    }


def test_a_mistake_in_a_process_is_said_once(cluster: str) -> None:
    """Rates that high end in no numbers: both processes find it, one error comes back, as it was raised."""
    with pytest.raises(TrainingFailed, match="no finite numbers") as found:
        train(cluster, {**UNLIKE, "cluster": "2xcpu", "stages": [], "dp": 2}, steps=60, lr=1e30, clip=0.0)
    assert found.value.exit_code == 1
    assert not ray.is_initialized()


def test_nodes_that_are_not_there_are_named(cluster: str) -> None:
    with pytest.raises(MeshwrightError, match=r"2 with 4 CPU \(0 such in the cluster\)"):
        train(
            cluster,
            {**UNLIKE, "cluster": "2x4xcpu", "stages": [], "dp": 8, "global_batch": 8, "micro_batches": 1},
            room=1,
            steps=1,
        )


def start(address: str, folder: Path) -> subprocess.Popen[str]:
    options = ["--on", "ray", "--address", address, "--steps", "100000", "--json", "-o", "run"]
    command = [sys.executable, "-m", "meshwright", "launch", written(folder), *options]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_ends_a_run_after_a_step_with_a_checkpoint(cluster: str, tmp_path: Path) -> None:
    process = start(cluster, tmp_path)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["step"] == 1
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (3, "SIGINT: stopping after this step; again: at once\n")
    assert latest(tmp_path / "run/checkpoints")[0] is not None


def test_a_lost_actor_ends_the_run_with_one_message(cluster: str, tmp_path: Path) -> None:
    process = start(cluster, tmp_path)
    assert process.stdout is not None
    process.stdout.readline()
    rows = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    worker = next(int(row.split()[0]) for row in rows if "ray::Rank" in row)
    begun = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    out, err = process.communicate(timeout=40)
    assert time.monotonic() - begun < 30
    assert process.returncode == 1
    (said,) = (line for line in err.splitlines() if line.startswith("error: "))  # Ray reports the lost worker, too
    assert re.fullmatch(rf"error: rank \d \(\S+, process {worker}\) was ended in .*", said)
    assert "raylet" not in out


def test_no_cluster_is_a_mistake_of_the_address() -> None:
    with pytest.raises(InputError, match="--address: no cluster of Ray answers"):
        train("127.0.0.1:1", UNLIKE, steps=1)


def test_kinds_of_devices_are_asked_for_by_rays_names() -> None:
    from ray.util.accelerators import accelerators

    plan = using("1x8xa100-80gb+2x8xmi300x", list(range(24)))
    first, second, third = driver.bundles(request(plan))
    assert first == {"GPU": 8, "CPU": 8, f"accelerator_type:{accelerators.NVIDIA_A100}": 0.001}
    assert second == third == {"GPU": 8, "CPU": 8, f"accelerator_type:{accelerators.AMD_INSTINCT_MI300x}": 0.001}
    known = {value for name, value in vars(accelerators).items() if isinstance(value, str)}
    for name in (
        "v100-16gb",
        "v100-32gb",
        "a100-40gb",
        "h100",
        "h200",
        "h20",
        "b200",
        "gb200",
        "l4",
        "t4",
        "a10g",
        "mi325x",
        "mi355x",
    ):
        assert driver.accelerator_type(mw.Cluster.preset(name).device(0)) in known, name


def test_traces_read_on_nodes_say_what_they_say_here(cluster: str, tmp_path: Path) -> None:
    for file in (ROOT / "tests/data/traces/param/dlrm_8rank").iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "rank9.json").write_text("{")
    there = document(mw.analyze(tmp_path, ray=cluster, cache=False))
    assert there == document(mw.analyze(tmp_path, workers=1, cache=False))
    assert len(there["ranks"]) == 8
    assert [Path(one["path"]).name for one in there["skipped"]] == ["rank9.json"]
    assert not ray.is_initialized()
