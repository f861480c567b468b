"""Files that people keep say which version they are of; newer ones are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.clusters import Cluster
from meshwright.errors import InputError

FILE = '{version}name = "ours"\n[[group]]\nnodes = 2\ndevice = "h100"\ndevices_per_node = 8\n'


@pytest.mark.parametrize("line", ["", "version = 1\n"])
def test_a_cluster_file_of_this_version_is_read(line: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(FILE.format(version=line))
    assert Cluster.load(tmp_path / "cluster.toml").devices == 16


def test_a_newer_cluster_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(FILE.format(version="version = 2\n"))
    with pytest.raises(InputError, match=r"cluster.toml: version: is 2, written by a newer meshwright"):
        Cluster.load(tmp_path / "cluster.toml")


def test_a_plan_says_what_made_it() -> None:
    job = mw.Job(mw.Model.preset("tiny-gpt2"), mw.Cluster.preset("2xh100"), 4, seq_len=64)
    found = mw.plan(job)
    assert found.search is not None
    assert found.search["made_by"]["meshwright"] == mw.__version__
    assert {"catalogue", "calibration"} < set(found.search["made_by"])
    table = json.loads(found.to_json())
    with pytest.raises(InputError, match="version: is 99, written by a newer meshwright"):
        mw.Plan.of(table | {"version": 99})


def test_events_begin_with_their_version(tmp_path: Path) -> None:
    job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("1xcpu"), 4, seq_len=32, precision="fp32")
    mw.train(mw.Plan.of({}, job), steps=1, output=str(tmp_path / "run"))
    first = json.loads((tmp_path / "run/events.jsonl").read_text().splitlines()[0])
    assert (first["event"], first["version"]) == ("start", 1)
