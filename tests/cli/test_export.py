"""export and import on the real command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.plans import Plan
from tests.conftest import ROOT, Run

SCRIPT = str(ROOT / "examples/megatron_llama3_70b.sh")
IMPORT = ("import", SCRIPT, "--from", "megatron", "--cluster", "8x8xh100")
EXPORT = ("export", "tp=8,pp=4", "--model", "llama3-70b", "--cluster", "8x8xh100", "--batch", "64", "--seq", "8192")


def test_there_and_back(meshwright: Run, tmp_path: Path) -> None:
    done = meshwright(*IMPORT, "-o", "theirs.json")
    assert done.returncode == 0, done.stderr
    assert "meshwright explain theirs.json" in done.stdout
    assert "assumed: model: its shape is that of llama3-70b" in done.stderr
    assert "--manual-gc" in done.stderr
    theirs = Plan.load(tmp_path / "theirs.json")
    assert theirs.estimate is not None
    assert theirs.estimate["runtime"] == "megatron-overlap"
    assert meshwright("export", "theirs.json", "--to", "megatron", "-o", "run").returncode == 0
    assert Plan.load(tmp_path / "run/plan.json").pipelines == theirs.pipelines
    again = meshwright("import", "run/pretrain_megatron.sh", "--from", "megatron", "--cluster", "8x8xh100", "--json")
    facts = json.loads(again.stdout)
    assert facts["unknown"] == []
    assert facts["plan"]["pipelines"] == theirs.to_table()["pipelines"]
    assert facts["step_time_s"] == pytest.approx(theirs.estimate["step_time_s"])


def test_an_import_is_priced_as_its_framework_runs_it(meshwright: Run) -> None:
    meshwright(*IMPORT, "-o", "theirs.json")
    assert json.loads(meshwright("estimate", "theirs.json", "--json").stdout)["runtime"] == "megatron-overlap"
    assert "Megatron-Core" in meshwright("explain", "theirs.json", "--seconds", "0").stdout


def test_a_document_can_be_piped(meshwright: Run) -> None:
    printed = meshwright(*IMPORT).stdout
    assert Plan.parse(printed).pipelines
    done = meshwright("estimate", "-", "--json", input=printed)
    assert json.loads(done.stdout)["model"] == "llama3-70b"
    with open(SCRIPT) as script:
        from_stdin = meshwright("import", "-", "--from", "megatron", "--cluster", "8x8xh100", stdin=script)
    assert from_stdin.stdout == printed


def test_what_cannot_be_said_has_a_price(meshwright: Run) -> None:
    plan = ("tp=8,pp=4,zero=3,schedule=gpipe", *EXPORT[2:])
    done = meshwright("export", *plan, "--to", "megatron")
    assert done.returncode == 0
    assert done.stdout.startswith("#!/usr/bin/env bash")
    for words in ("cannot be said: schedule: gpipe", "cannot be said: zero: 3", "as given", "--for megatron"):
        assert words in done.stderr
    facts = json.loads(meshwright("export", *plan, "--to", "megatron", "--json").stdout)
    assert len(facts["missing"]) == 2
    assert facts["step_time_s"] != facts["given_step_time_s"]
    assert list(facts["files"]) == ["pretrain_megatron.sh", "plan.json"]


def test_a_plan_searched_for_megatron_is_said_exactly(meshwright: Run) -> None:
    search = ("plan", "llama3-8b", "8xh100", "--batch", "64", "--seq", "8192", "--for", "megatron", "--no-why")
    assert meshwright(*search, "-o", "plan.json").returncode == 0
    for name in ("megatron", "nemo", "slime"):
        assert json.loads(meshwright("export", "plan.json", "--to", name, "--json").stdout)["missing"] == []


def test_formats_are_listed(meshwright: Run) -> None:
    done = meshwright("export", "--to", "list")
    assert "Megatron-LM" in done.stdout
    names = {row["name"]: row["reads"] for row in json.loads(meshwright("export", "--to", "list", "--json").stdout)}
    assert names["megatron"] is True
    assert names["mindspeed"] is False


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["export", "--to", "megatron"], 2, ["PLAN"]),
        ([*EXPORT], 2, ["--to"]),
        ([*EXPORT, "--to", "megatronn"], 2, ["--to", "did you mean megatron"]),
        ([*EXPORT, "--to", "megatron", "-o", "no/such/folder"], 2, ["--output", "no folder"]),
        (["export", "absent.json", "--to", "megatron"], 2, ["absent.json", "no such file"]),
        (["export", "zero=1", "--model", "bert-base", "--cluster", "8xh100", "--batch", "64", "--to", "nemo"], 1, ["bert"]),
        (["import", "absent.sh", "--from", "megatron", "--cluster", "8xh100"], 2, ["absent.sh"]),
        (["import", SCRIPT, "--from", "megatron"], 2, ["--cluster"]),
        (["import", SCRIPT, "--from", "slime", "--cluster", "8xh100"], 2, ["cannot be read", "megatron"]),
        (["import", SCRIPT, "--from", "megatron", "--cluster", "3x8xh100"], 2, ["32 does not divide 24 devices"]),
        (["import", SCRIPT, "--from", "megatron", "--cluster", "8x8xh1000"], 2, ["--cluster"]),
        ([*IMPORT, "--model", "llama3-8b"], 2, ["is 80, but --model llama3-8b has 32"]),
        ([*IMPORT, "--batch", "100"], 2, ["512", "--batch is 100"]),
        ([*IMPORT, "-o", "no/plan.json"], 2, ["no folder"]),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(meshwright: Run, arguments: list[str], code: int, words: list[str]) -> None:
    done = meshwright(*arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr


def test_unknown_arguments_are_listed_with_a_guess(meshwright: Run, tmp_path: Path) -> None:
    text = Path(SCRIPT).read_text().replace("--bf16", "--bf16 --tensor-model-paralel-size 4 --our-own 3")
    (tmp_path / "run.sh").write_text(text)
    done = meshwright("import", "run.sh", "--from", "megatron", "--cluster", "8x8xh100")
    assert done.returncode == 0
    assert "unknown: --tensor-model-paralel-size; did you mean --tensor-model-parallel-size?" in done.stderr
    assert "unknown: --our-own\n" in done.stderr
