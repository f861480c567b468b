"""plan, explain, compare and sweep on the real command line."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.planning.search_options import Watch, proof
from meshwright.plans import Plan
from meshwright.search.explanation.features import choices, spans_of
from tests.conftest import Run

PLAN = ("plan", "llama3-8b", "8xh100", "--batch", "64", "--seq", "8192")
IN_STAGES = (*PLAN, "--fix", "pp=2")
SMALL = ("gpt2-xl", "8xa100-80gb")  # planned in a tenth of a second


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan file that `meshwright plan` has written, once for all tests."""
    folder = tmp_path_factory.mktemp("plan")
    code = "from meshwright.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *IN_STAGES, "-o", "plan.json", "--no-why"],
        cwd=folder,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "plan.json"


def test_plan_for_programs(meshwright: Run) -> None:
    done = meshwright(*PLAN, "--json")
    assert done.returncode == 0
    assert done.stderr == ""
    table = json.loads(done.stdout)
    found = Plan.of(table)  # keeps every rule
    assert found.to_json() == done.stdout  # and nothing else was printed
    facts, predicted = table["search"], table["estimate"]
    assert {"seconds", "optimal", "bound", "gap", "explored", "runtime", "fixed", "forbidden"} <= set(facts)
    assert facts["optimal"] is True
    assert facts["gap"] == 0
    assert {"step_time_s", "tokens_per_s_per_device", "mfu", "peak_memory_bytes", "seconds", "stages"} <= set(predicted)
    assert sum(predicted["seconds"].values()) == pytest.approx(predicted["step_time_s"])
    assert "why" not in facts


def test_plan_for_people(meshwright: Run, tmp_path: Path) -> None:
    done = meshwright(*IN_STAGES, "-o", "plan.json", "--html", "report.html", "--top", "2")
    for words in (
        "0-3",
        "tokens/s/device",
        "MFU",
        "proven optimal in the searched space: bound equals value",
        "runner-up",
        "limited by",
    ):
        assert words in done.stdout
    assert re.search(r": \+\d+(\.\d)? %", done.stdout)  # what would help, with a percentage
    assert Plan.load(tmp_path / "plan.json").search
    assert "</html>" in (tmp_path / "report.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "report.html"]  # nothing half-written


def test_no_why_is_quick_and_short(meshwright: Run) -> None:
    text = meshwright(*IN_STAGES, "--no-why").stdout
    assert "proven optimal" in text
    assert "limited by" not in text
    assert "runner-up" not in text


def test_why_goes_into_the_document(meshwright: Run) -> None:
    table = json.loads(meshwright("plan", *SMALL, "--batch", "64", "--json", "--why").stdout)
    assert table["search"]["why"]["limit"]["text"]
    assert table["search"]["why"]["helps"]
    assert table["search"]["runners_up"][0]["loses"]
    Plan.of(table)


def test_fix_and_forbid(meshwright: Run) -> None:
    done = meshwright(
        *PLAN, "--fix", "tp=2,pp=2", "--fix", "zero=1", "--forbid", "offload,zbv", "--forbid", "mixed", "--json"
    )
    found = Plan.of(json.loads(done.stdout))
    assert {(span.tp, span.zero) for span in spans_of(found)} == {(2, 1)}
    assert choices(found)["pp"] == "2"
    assert choices(found)["schedule"] != "zbv"
    assert found.search
    assert found.search["fixed"] == {"tp": 2, "pp": 2, "zero": 1}
    assert found.search["forbidden"] == ["mixed", "offload", "zbv"]


def test_for_another_framework(meshwright: Run) -> None:
    found = Plan.of(json.loads(meshwright(*PLAN, "--for", "fsdp", "--json").stdout))
    assert found.search
    assert found.search["runtime"] == "fsdp"
    assert {(span.tp, span.ring, span.dp) for span in spans_of(found)} == {(1, 1, 8)}


def test_nothing_fits(meshwright: Run) -> None:
    done = meshwright("plan", "llama3-70b", "1xh100", "--batch", "8", "--seq", "4096", "--json")
    assert done.returncode == 1
    assert set(json.loads(done.stdout)) == {"error", "closest", "short_by_bytes", "suggestion"}
    assert "short by" in done.stderr
    assert "enough" in done.stderr  # what would be
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "llama3-8b", "8xh100"], ["--batch"]),
        (["plan", "lama3-8b", "8xh100", "--batch", "8"], ["MODEL", "llama3-8b"]),
        (["plan", "llama3-8b", "8xh10", "--batch", "8"], ["CLUSTER", "h100"]),
        (["plan", "gpt2", "8xh100", "--batch", "8", "--seq", "2048"], ["--seq", "1024"]),
        ([*PLAN, "--fix", "tp"], ["--fix", "NAME=VALUE"]),
        ([*PLAN, "--fix", "tpp=2"], ["--fix", "did you mean tp"]),
        ([*PLAN, "--fix", "tp=0"], ["--fix tp", "at least 1"]),
        ([*PLAN, "--fix", "tp=2", "--fix", "tp=4"], ["--fix", "twice"]),
        ([*PLAN, "--fix", "tp=2", "--forbid", "tp"], ["--fix", "forbidden"]),
        ([*PLAN, "--forbid", "offlod"], ["--forbid", "offload"]),
        ([*PLAN, "--for", "megatronn"], ["--for", "megatron"]),
        ([*PLAN, "--for", "megatron", "--fix", "zero=3"], ["--fix zero", "megatron cannot"]),
        ([*PLAN, "--time-limit", "0"], ["--time-limit"]),
        ([*PLAN, "--solver", "guess"], ["--solver", "exact"]),
        ([*PLAN, "--top", "-1"], ["--top"]),
        ([*PLAN, "-o", "no/such/plan.json"], ["--output", "no/such"]),
        ([*PLAN, "-o", "same", "--html", "same"], ["--html", "--output"]),
        (["explain", "nowhere.json"], ["nowhere.json"]),
        (["explain", "tp=2"], ["--model"]),
        (["compare", "tp=2"], ["B"]),
        (["compare", "tp=2", "tp=4"], ["--model"]),
        (["sweep", "llama3-8b", "8xh100"], ["--batch"]),
        (["sweep", "llama3-8b", "8xh100", "--batch", "64,x"], ["--batch", "256,512"]),
        (["sweep", "llama3-8b", "8xh100", "--batch", "64", "--nodes", "0"], ["--nodes"]),
        (["sweep", "llama3-8b", "8xh100+8xa100-80gb", "--batch", "64", "--nodes", "2"], ["CLUSTER"]),
        (["sweep", "llama3-8b", "8xh100", "--batch", "64", "--csv", "--json"], ["--csv", "--json"]),
    ],
)  # fmt: skip
def test_mistakes_name_the_option(meshwright: Run, arguments: list[str], words: list[str]) -> None:
    done = meshwright(*arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def test_explain(meshwright: Run, written: Path) -> None:
    text = meshwright("explain", str(written)).stdout
    for words in ("where the step goes", "limited by", "devices 0-3: bound by", "what would help"):
        assert words in text
    by_hand = ["tp=2,pp=2", "--model", "llama3-8b", "--cluster", "8xh100", "--batch", "64", "--seq", "8192"]
    assert "the best plan: +" in meshwright("explain", *by_hand, "--seconds", "30").stdout
    facts = json.loads(meshwright("explain", *by_hand, "--seconds", "0", "--json").stdout)
    assert sum(facts["seconds"].values()) == pytest.approx(facts["step_time_s"])
    assert facts["helps"] == []


def test_explain_takes_the_framework_of_the_search(meshwright: Run, tmp_path: Path) -> None:
    assert meshwright(*PLAN, "--for", "megatron", "-o", "theirs.json", "--no-why").returncode == 0
    told = json.loads((tmp_path / "theirs.json").read_text())["estimate"]["step_time_s"]
    facts = json.loads(meshwright("explain", "theirs.json", "--seconds", "0", "--json").stdout)
    assert facts["step_time_s"] == pytest.approx(told)


def test_compare(meshwright: Run, written: Path) -> None:
    text = meshwright("compare", str(written), "tp=2,pp=2").stdout  # the short text takes the file's job
    for words in ("schedule", "tensor parallel", "tokens/s/device", "the first trains +"):
        assert words in text
    facts = json.loads(meshwright("compare", str(written), "tp=2,pp=2", "--json").stdout)
    assert facts["gain"] < 0
    assert facts["second"]["choices"]["tp"] == "2"
    assert meshwright("compare", str(written), str(written), "--batch", "8").returncode == 2


def test_sweep(meshwright: Run, tmp_path: Path) -> None:
    sweep = ("sweep", *SMALL, "--batch", "32,64", "--seq", "1024", "--nodes", "1,2")
    rows = json.loads(meshwright(*sweep, "--json", "--price", "2").stdout)
    assert [(row["nodes"], row["batch"]) for row in rows] == [(1, 32), (1, 64), (2, 32), (2, 64)]
    assert all(row["fits"] and row["dollars_per_billion_tokens"] > 0 for row in rows)
    lines = list(csv.DictReader(meshwright(*sweep, "--csv", "--html", "sweep.html").stdout.splitlines()))
    assert [float(line["tokens_per_s"]) for line in lines] == pytest.approx([row["tokens_per_s"] for row in rows])
    assert "</html>" in (tmp_path / "sweep.html").read_text()


def test_a_sweep_says_what_does_not_fit(meshwright: Run) -> None:
    done = meshwright("sweep", "llama3-70b", "1xh100", "--batch", "8", "--seq", "4096")
    assert done.returncode == 1
    assert "no plan fits" in done.stdout


def test_who_stopped_a_search_is_known() -> None:
    with pytest.raises(KeyboardInterrupt), Watch() as watch:
        os.kill(os.getpid(), signal.SIGINT)
    facts = {"optimal": False, "gap": 0.013, "bound": 1.5, "explored": 12_996, "seconds": 0.42}
    assert proof(facts, watch.reason).startswith(
        "gap 1.3%: interrupted; nothing is faster than 1.5 s, 12,996 candidates"
    )
    assert Watch(time_limit=0.0).reason == "time limit"
    assert proof(facts | {"optimal": True}, "").startswith(
        "proven optimal in the searched space: bound equals value, 12,996 candidates in 0.42 s"
    )
