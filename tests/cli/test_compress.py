"""`meshwright compress`: what it prints for people is what it prints for programs; mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from meshwright.base.units import size
from meshwright.cli import cli
from meshwright.compression import preflight
from meshwright.compression.planning.page import bandwidth, row
from tests.conftest import Run

SHORT = {"model": "tiny-llama", "cluster": "4xcpu", "global_batch": 8, "precision": "fp32", "zero": 0}
WAYS = ("none", "fp16", "int4", "powersgd 8")


@pytest.fixture
def plan(tmp_path: Path) -> str:
    (tmp_path / "plan.json").write_text(json.dumps(SHORT))
    return "plan.json"


def said(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["compress", *arguments], catch_exceptions=False, env={"COLUMNS": "200"})
    assert done.exit_code == 0
    return done.stdout


def facts() -> dict[str, Any]:
    def cell(i: int, j: int) -> dict[str, Any]:
        return {
            "bytes": 4096 << 4 * i, "mbit": 10.0**j, "way": WAYS[(i + j) % 4], "topology": "ring", "piece": 1 << 18,
            "pieces": i + j, "sent_bytes": 1000 + i, "seconds": 0.5, "plain_seconds": 2.0 + i, "steps": 1.25,
            "speed_up": (2.0 + i) / (0.5 * 1.25),
        }  # fmt: skip

    return {
        "processes": 4, "latency_seconds": 2e-3, "cores": 2.0, "sizes": [4096 << 4 * i for i in range(3)],
        "mbits": [10.0**j for j in range(1, 5)], "grid": [[cell(i, j) for j in range(1, 5)] for i in range(3)],
        "mbit": 100.0, "table": [cell(i, 2) for i in range(3)],
    }  # fmt: skip


def test_the_table_is_the_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(preflight, "grid", lambda *given: asked.append(given[:3]) or facts())
    words = ("explain", "--processes", "4", "--mbit", "100", "--latency", "2")
    found = json.loads(said(*words, "--json"))
    assert found == facts()
    assert asked == [(4, 100.0, 2e-3)]
    page = tmp_path / "pays.html"
    lines = said(*words, "--html", str(page)).splitlines()
    assert page.read_text().startswith("<!doctype html>")
    start = next(i for i, line in enumerate(lines) if "10 Gbit" in line)
    assert lines[start].split() == ["gradient", *" ".join(map(bandwidth, found["mbits"])).split()]
    for line, bytes_, cells in zip(lines[start + 1 :], found["sizes"], found["grid"], strict=False):
        assert line.split() == [*size(bytes_).split(), *" ".join(cell["way"] for cell in cells).split()]
    start = next(i for i, line in enumerate(lines) if "speed-up" in line)
    for line, cell in zip(lines[start + 1 :], found["table"], strict=False):
        assert line.split() == " ".join(row(cell)).split()
        assert float(line.split()[-1][:-1]) == pytest.approx(cell["plain_seconds"] / 0.625, abs=0.05)


def test_a_narrow_terminal_shows_every_other_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "grid", lambda *_: facts())
    done = CliRunner().invoke(cli, ["compress", "explain", "--processes", "4"], env={"COLUMNS": "80"})
    assert "10 Mbit" in done.stdout
    assert "100 Mbit  " not in done.stdout.splitlines()[1]
    assert max(map(len, done.stdout.splitlines()[:5])) <= 80


def test_a_real_grid(meshwright: Run, tmp_path: Path) -> None:
    done = meshwright("compress", "explain", "--processes", "2", "--mbit", "5", "--json", "--html", "pays.html")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["table"][-1]["way"] != "none"  # 64 MiB at 5 Mbit/s
    assert found["table"][-1]["plain_seconds"] > 100
    assert '"powersgd' in (tmp_path / "pays.html").read_text() or '"int4"' in (tmp_path / "pays.html").read_text()


def test_a_plan_takes_what_pays_and_keeps_every_rule(meshwright: Run, plan: str, tmp_path: Path) -> None:
    done = meshwright("compress", "explain", plan, "--mbit", "20", "-o", "new.json", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    written = json.loads((tmp_path / "new.json").read_text())
    assert written["compression"] == found["compression"] != []
    assert {rule["algorithm"] for rule in written["compression"]} <= {"fp16", "int8", "int4", "int2", "powersgd"}
    assert found["speed_up"] == found["plain_seconds"] / (found["seconds"] * found["steps"]) > 1 / 0.9
    checked = meshwright("check", "new.json")
    assert checked.returncode == 0, checked.stderr
    assert "keeps every rule" in checked.stdout
    del written["compression"]
    assert written == json.loads(meshwright("show", plan, "--json").stdout)


def test_where_nothing_pays_the_plan_stays_as_it_is(meshwright: Run, plan: str, tmp_path: Path) -> None:
    done = meshwright("compress", "explain", plan, "--mbit", "1e7", "--latency", "0", "-o", "new.json")
    assert done.returncode == 0, done.stderr
    assert "nothing pays: gradients stay as they are" in done.stdout
    assert "block.3.mlp and 3 like it" in done.stdout
    assert "compression" not in json.loads((tmp_path / "new.json").read_text())


def test_a_plan_on_its_own_cluster(meshwright: Run, plan: str) -> None:
    done = meshwright("compress", "explain", plan)
    assert done.returncode == 0, done.stderr
    assert "the cluster's links" in done.stdout
    assert "note:" not in done.stdout


def test_bench(meshwright: Run) -> None:
    done = meshwright("compress", "bench", "--codecs", "fp16, onebit", "--mib", "1")
    assert done.returncode == 0, done.stderr
    head, titles, *rows = done.stdout.splitlines()
    assert "1.0 MiB of float32: copy" in head
    assert "GB/s" in titles
    assert [line.split()[:2] for line in rows] == [["fp16", "2.0"], ["onebit", "32.0"]]
    copy = float(head.split()[-2])
    for line in rows:
        rate, part, microseconds = line.split()[2:5]
        assert float(part[:-1]) / 100 == pytest.approx(float(rate) / copy, abs=0.01, rel=0.01)
        assert float(rate) > 0
        assert float(microseconds.replace(",", "")) > 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["explain"], "--processes: is needed without a PLAN"),
        (["explain", "--processes", "1"], "1 is not in the range"),
        (["explain", "--processes", "4", "--mbit", "0"], "0.0 is not in the range"),
        (["explain", "--processes", "4", "--mbit", "-3"], "-3.0 is not in the range"),
        (["explain", "--processes", "4", "--mbit", "nan"], "--mbit: is no number"),
        (["explain", "--processes", "4", "-o", "x.json"], "--output: needs a PLAN"),
        (["explain", "--processes", "4", "--html", "no/where.html"], "--html: there is no folder 'no'"),
        (["explain", "no.json"], "no.json: no such file"),
        (["explain", "broken.json"], "broken.json"),
        (["explain", "plan.json", "--processes", "4"], "--processes: does not go with a PLAN"),
        (["explain", "plan.json", "--html", "x.html"], "--html: does not go with a PLAN"),
        (["explain", "plan.json", "--latency", "1"], "--latency: goes with --mbit"),
        (["bench", "--codecs", "fp16,fp17"], "--codecs: unknown codec 'fp17' (valid: bf16,"),
        (["bench", "--mib", "0"], "0 is not in the range"),
        (["benhc"], "benhc"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(meshwright: Run, plan: str, tmp_path: Path, words: list[str], problem: str) -> None:
    (tmp_path / "broken.json").write_text('{"model": ')
    done = meshwright("compress", *words)
    assert done.returncode == 2
    assert problem in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_help_teaches(meshwright: Run) -> None:
    for verb in ("bench", "explain"):
        text = meshwright("compress", verb, "--help").stdout
        assert f"meshwright compress {verb} " in text
        assert "Exit codes" in text
