"""Measuring a real cluster of Ray, whose two nodes are processes of this machine, and two nodes under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.errors import InputError
from meshwright.launchers.ray import measure
from meshwright.run.processes.launch import free_port
from tests.conftest import ROOT
from tests.packages import installed

if not installed("ray"):
    pytest.skip("ray is not installed", allow_module_level=True)

from tests.launchers.small import Small
from tests.launchers.test_ray import cluster  # noqa: F401  (the fixture)


def check(path: Path) -> None:
    found = mw.Cluster.load(path)
    assert (found.groups[0].nodes, found.devices) == (2, 2)
    assert found.groups[0].network.measured is not None  # between nodes
    assert found.device(0).measured is not None


def test_all_nodes_of_ray_and_the_links_between_them(
    cluster: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "Measurer", Small)
    path = tmp_path / "cluster.toml"
    told: list[str] = []
    measure.measure(str(path), 0, lambda name, done, of: told.append(name), address=cluster)
    assert told[-1] == "done"
    check(path)


def test_two_nodes_of_one_name_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    path, port = tmp_path / "cluster.toml", free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr",
               "127.0.0.1", "--master-port", str(port)]  # fmt: skip
    end = ["-m", "tests.launchers.small", str(path)]
    nodes = [subprocess.Popen([*command, "--node-rank", str(rank), *end]) for rank in (0, 1)]
    assert [node.wait(timeout=240) for node in nodes] == [0, 0]
    check(path)


def test_a_wrong_output_is_said_before_ray_is_asked() -> None:
    with pytest.raises(InputError, match=r"is no \.toml file"):
        measure.measure("cluster.json")
