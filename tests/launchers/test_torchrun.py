"""torchrun's commands: read by PyTorch's own parser, and run for real on two 'nodes' of this machine."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from meshwright.errors import InputError
from meshwright.launchers import torchrun
from tests.conftest import ROOT, Run
from tests.launchers.plans import losses_in, losses_of_one_process, request, using, written


def parsed(script: str) -> list[tuple[dict[str, str], Any]]:
    """(environment, torchrun's arguments) of every line."""
    found = []
    for line in script.splitlines():
        if line.startswith("#"):
            continue
        words = shlex.split(line)
        start = words.index("python")
        assert tuple(words[start : start + 3]) == torchrun.AGENT
        found.append(
            (dict(word.split("=", 1) for word in words[:start]), get_args_parser().parse_args(words[start + 3 :]))
        )
    return found


def test_one_node_stands_alone() -> None:
    ((environment, found),) = parsed(torchrun.script(request(using("1x8xh100", list(range(8))))))
    assert environment == {}
    assert (found.standalone, found.nproc_per_node, found.module) == (True, "8", True)
    assert (found.training_script, found.training_script_args[:3]) == ("meshwright", ["train", "--plan", "plan.json"])


def test_every_node_has_its_number_and_its_devices() -> None:
    plan = using("2x8xa100-80gb+4x8xv100-32gb", [*range(16), *range(20, 24), *range(24, 48)])
    found = parsed(torchrun.script(request(plan), "node01:1234"))
    assert [arguments.node_rank for _, arguments in found] == [0, 1, 2, 3, 4, 5]
    assert {(a.nnodes, a.master_addr, a.master_port, a.rdzv_backend) for _, a in found} == {
        ("6", "node01", 1234, "static")
    }
    assert [a.nproc_per_node for _, a in found] == ["8", "8", "4", "8", "8", "8"]
    assert [env for env, _ in found] == [{}, {}, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {}, {}, {}]


@pytest.mark.parametrize("address", ["", "a:b", ":29500", "a:b:c", "a:99999"])
def test_several_nodes_need_an_address(address: str) -> None:
    with pytest.raises(InputError, match="--address"):
        torchrun.script(request(using("2x1xh100", [0, 1])), address)


def test_two_nodes_of_unequal_size_train(tmp_path: Path, meshwright: Run) -> None:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port = opened.getsockname()[1]
    options = ["--on", "torchrun", "--address", f"127.0.0.1:{port}", "--steps", "4", "-o", "run"]
    done = meshwright("launch", written(tmp_path), *options)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(lines) == 2
    path = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    nodes = []
    for line in reversed(lines):  # the last node may well come first
        words = [sys.executable, *shlex.split(line)[1:]]
        nodes.append(subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True))
    for node in nodes:
        _, err = node.communicate(timeout=90)
        assert node.returncode == 0, err
    assert losses_in(tmp_path / "run") == pytest.approx(losses_of_one_process(4), rel=1e-4)
