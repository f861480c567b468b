"""`meshwright analyze` as people call it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT, Run

TRACES = ROOT / "tests/data/traces/param/dlrm_8rank"


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(shutil.copytree(TRACES, tmp_path_factory.mktemp("job") / "traces"))


def test_the_summary_the_page_and_the_window(meshwright: Run, traces: str, tmp_path: Path) -> None:
    page, window = tmp_path / "report.html", tmp_path / "window.json"
    found = meshwright("analyze", traces, "--html", str(page), "--perfetto", str(window))
    assert found.returncode == 0, found.stderr
    assert "a step takes, on average, 14.7 ms" in found.stdout
    assert f"written to {page}" in found.stdout
    assert "Where the time went" in page.read_text()
    assert len(json.loads(window.read_text())["traceEvents"]) > 10_000


def test_json_is_for_programs(meshwright: Run, traces: str) -> None:
    found = json.loads(meshwright("analyze", traces, "--json").stdout)
    assert [rank["rank"] for rank in found["ranks"]] == list(range(8))
    assert found["findings"][0]["share"] == pytest.approx(found["shares"]["host_bound"])


def test_sql(meshwright: Run, traces: str) -> None:
    query = "select kind, count(*) calls from calls group by kind order by kind"
    assert json.loads(meshwright("analyze", traces, "--sql", query, "--json").stdout) == [
        {"kind": "all_reduce", "calls": 24},
        {"kind": "all_to_all", "calls": 40},
    ]
    assert "all_to_all" in meshwright("analyze", traces, "--sql", query).stdout


def test_mistakes_are_one_line(meshwright: Run, traces: str, tmp_path: Path) -> None:
    for arguments, words in (
        ([str(tmp_path)], "holds no traces"),
        ([traces, "--html", str(tmp_path)], "--html: is a folder"),
        ([traces, "--sql", "select"], "--sql:"),
        ([traces, "--plan", str(tmp_path / "no.json")], "no such file"),
        ([traces, "--ray", "nowhere:1"], "--ray: no cluster of Ray answers"),
        ([traces, "--sql", ""], "--sql: is no query"),
        ([str(ROOT / "tests/data/traces/straggler/trace-ST.parquet"), "--sql", "show tables"], "there are no traces"),
    ):
        found = meshwright("analyze", *arguments)
        assert found.returncode == 2
        assert words in found.stderr
        assert "Traceback" not in found.stderr
