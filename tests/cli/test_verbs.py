"""The command line: what each verb prints for people and for programs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from meshwright.base.units import size
from meshwright.cli import VERBS
from meshwright.clusters import Cluster
from meshwright.cost import plan_memory
from meshwright.models import Model, presets
from meshwright.plans import Job, Plan
from tests.conftest import ROOT, Run

SHORT = {"model": "llama3-70b", "cluster": "8x8xh100", "global_batch": 512, "seq_len": 8192, "tp": 8, "pp": 4}


@pytest.fixture
def plan(tmp_path: Path) -> str:
    (tmp_path / "plan.json").write_text(json.dumps(SHORT))
    return "plan.json"


def test_models_json(meshwright: Run) -> None:
    done = meshwright("models", "llama3-70b", "--json")
    facts = json.loads(done.stdout)
    assert done.returncode == 0
    assert facts["parameters"] == 70553706496
    assert sum(layer["parameters"] for layer in facts["layers"]) == 70553706496
    assert facts["layers"][1]["kept_bytes"]["full"] == 2 * 4096 * 8192


def test_models_list_has_every_preset(meshwright: Run) -> None:
    rows = json.loads(meshwright("models", "--json").stdout)
    assert [row["name"] for row in rows] == list(presets())
    text = meshwright("models").stdout
    assert "70,553,706,496" in text
    assert len(text.splitlines()) == len(presets()) + 1


def test_models_for_people(meshwright: Run) -> None:
    text = meshwright("models", "deepseek-v3", "--seq", "4096").stdout
    assert "671,026,404,352 parameters" in text
    assert "block.*.moe" in text
    assert "x58" in text


def test_models_from_a_file(meshwright: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(presets()["gpt2"].config))
    assert json.loads(meshwright("models", "config.json", "--json").stdout)["parameters"] == 124439808


def test_clusters(meshwright: Run) -> None:
    facts = json.loads(meshwright("clusters", "2x8xa100-80gb+4x8xv100-32gb", "--json").stdout)
    assert facts["devices"] == 48
    assert [group["device"]["name"] for group in facts["groups"]] == ["a100-80gb", "v100-32gb"]
    assert facts["groups"][0]["device"]["sources"]["memory_gib"]
    text = meshwright("clusters", "8xh100").stdout
    assert "989.4 TFLOP/s" in text
    assert "Sources" in text


def test_clusters_list(meshwright: Run) -> None:
    rows = json.loads(meshwright("clusters", "--json").stdout)
    assert len(rows) > 30
    assert "NVIDIA H100 SXM5 80 GB" in meshwright("clusters", env={**os.environ, "COLUMNS": "160"}).stdout


def test_detect_writes_a_cluster_that_loads(meshwright: Run, tmp_path: Path) -> None:
    assert meshwright("cluster", "detect", "-o", "here.toml").returncode == 0
    found = json.loads(meshwright("clusters", "here.toml", "--json").stdout)
    assert found["groups"] == json.loads(meshwright("cluster", "detect", "--json").stdout)["groups"]


def test_check(meshwright: Run, plan: str) -> None:
    done = meshwright("check", plan)
    assert done.returncode == 0
    assert "keeps every rule" in done.stdout
    facts = json.loads(meshwright("check", plan, "--json").stdout)
    assert facts["valid"] is facts["fits"] is True
    assert facts["peak_memory_bytes"] == max(row["total"] for row in facts["memory"])


def test_check_says_what_does_not_fit(meshwright: Run, tmp_path: Path) -> None:
    (tmp_path / "big.json").write_text(json.dumps({**SHORT, "tp": 1, "pp": 1}))
    done = meshwright("check", "big.json")
    assert done.returncode == 1
    assert "short by" in done.stderr
    as_json = meshwright("check", "big.json", "--json")
    assert as_json.returncode == 1
    assert json.loads(as_json.stdout)["short_by_bytes"] > 0


def test_check_with_the_job_beside_it(meshwright: Run, tmp_path: Path, plan: str) -> None:
    (tmp_path / "degrees.json").write_text('{"tp": 8, "pp": 4}')
    job = ["--model", "llama3-70b", "--cluster", "8x8xh100", "--batch", "512", "--seq", "8192"]
    assert meshwright("show", "degrees.json", *job, "--json").stdout == meshwright("show", plan, "--json").stdout
    assert meshwright("check", plan, *job).returncode == 2
    assert meshwright("check", "degrees.json", "--model", "llama3-70b").returncode == 2


def test_show_json_is_the_full_form(meshwright: Run, plan: str, tmp_path: Path) -> None:
    full = meshwright("show", plan, "--json").stdout
    (tmp_path / "full.json").write_text(full)
    assert meshwright("show", "full.json", "--json").stdout == full
    assert len(json.loads(full)["pipelines"][0]["stages"]) == 4


def test_show_draws(meshwright: Run, plan: str) -> None:
    text = meshwright("show", plan).stdout
    assert "48-63" in text
    assert "dp 2, zero 1, tp 8 + sp" in text


def test_schema(meshwright: Run) -> None:
    assert json.loads(meshwright("schema").stdout)["title"] == "meshwright plan"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(meshwright: Run, shell: str) -> None:
    assert "_MESHWRIGHT_COMPLETE" in meshwright("completion", shell).stdout


def test_completion_knows_names(meshwright: Run) -> None:
    environment = {
        **os.environ,
        "_MESHWRIGHT_COMPLETE": "bash_complete",
        "COMP_WORDS": "meshwright models qwen3-2",
        "COMP_CWORD": "2",
    }
    assert "qwen3-235b-a22b" in meshwright(env=environment).stdout
    environment["COMP_WORDS"] = "meshwright clusters 8x8xh10"
    assert "8x8xh100" in meshwright(env=environment).stdout


@pytest.mark.parametrize("verb", [[], *([verb] for verb in VERBS), ["cluster", "detect"]])
def test_help_teaches(meshwright: Run, verb: list[str]) -> None:
    done = meshwright(*verb, "--help")
    assert done.returncode == 0
    assert "Usage: meshwright" in done.stdout
    if verb and verb not in (["cluster"], ["schema"]):
        assert "Examples:" in done.stdout


def test_examples_in_help_run(meshwright: Run, plan: str, tmp_path: Path) -> None:
    """Every example line that needs no file of the user's own is run as printed."""
    (tmp_path / "short.json").write_text(json.dumps({"tp": 8, "pp": 4}))
    ran = 0
    for verb in ("models", "clusters", "check"):
        for line in meshwright(verb, "--help").stdout.splitlines():
            words = re.split(r"\s{2,}", line.strip())[0].split()
            if words[:1] == ["meshwright"] and "path/to" not in line and ".toml" not in line:
                done = meshwright(*words[1:])
                assert done.returncode == 0, (line, done.stderr)
                ran += 1
    assert ran >= 9


def test_the_readme_commands_for_plans_run(meshwright: Run) -> None:
    example = str(ROOT / "examples" / "llama3-70b.json")
    assert meshwright("check", example).returncode == 0
    assert meshwright("show", example).returncode == 0


def test_version(meshwright: Run) -> None:
    from meshwright import __version__

    assert meshwright("--version").stdout.strip().endswith(__version__)


def test_a_device_is_one_device_everywhere(meshwright: Run) -> None:
    assert json.loads(meshwright("clusters", "h100", "--json").stdout)["devices"] == 1
    for spelling in ("NVIDIA H100 80GB HBM3", "nvidia h100"):
        assert json.loads(meshwright("clusters", spelling, "--json").stdout)["groups"][0]["device"]["name"] == "h100"


def test_a_users_source_stays_what_it_is(meshwright: Run, tmp_path: Path) -> None:
    """Even where the catalogue has a document of that name."""
    (tmp_path / "lab.toml").write_text('[[group]]\ndevice = "a100-80gb"\nmemory_gib = [76, "nvidia-smi"]\n')
    facts = json.loads(meshwright("clusters", "lab.toml", "--json").stdout)
    assert facts["groups"][0]["device"]["sources"]["memory_gib"] == "nvidia-smi"


@pytest.mark.parametrize("columns", ["80", "100", "160"])
def test_narrow_terminals_keep_the_numbers(meshwright: Run, columns: str) -> None:
    wide = {**os.environ, "COLUMNS": columns}
    devices = meshwright("clusters", env=wide).stdout
    assert "a100-40gb-pcie" in devices
    assert "9,000" in devices
    assert "…" not in devices
    short = ["--model", "llama3-70b", "--cluster", "8x8xh100", "--batch", "512", "--seq", "8192"]
    picture = meshwright("show", "tp=4,pp=2", *short, env=wide).stdout
    assert "32-63" in picture
    job = Job(Model.preset("llama3-70b"), Cluster.preset("8x8xh100"), 512, 8192)
    fullest = max(plan_memory(Plan.of({"tp": 4, "pp": 2}, job), job), key=lambda row: row.short_by)
    assert f"short by {size(fullest.short_by)}" in picture


def numbers(value: object) -> list[float]:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    own = [value] if isinstance(value, int | float) else []
    return [*own, *(number for item in inside for number in numbers(item))]


def test_whole_numbers_are_whole(meshwright: Run) -> None:
    for arguments in (["models", "llama3-70b"], ["clusters", "8x8xh100"]):
        found = numbers(json.loads(meshwright(*arguments, "--json").stdout))
        assert len(found) > 15
        assert [number for number in found if isinstance(number, float) and number >= 1] == []


def test_notes_are_for_programs_too(meshwright: Run) -> None:
    job = ["--model", "llama3-8b", "--cluster", "8xh100", "--batch", "8", "--seq", "16384"]
    facts = json.loads(meshwright("check", "dp=4,zero=3,recompute=full", *job, "--json").stdout)
    assert facts["idle_devices"] == 4
    assert len(facts["notes"]) == 2


def test_a_huge_cluster_is_checked_in_seconds(meshwright: Run) -> None:
    job = ["--model", "llama3-70b", "--cluster", "100000x8xh100", "--batch", "1000000", "--seq", "8192"]
    assert meshwright("check", "tp=8,pp=4", *job, timeout=30).returncode == 0


ESTIMATE = ("estimate", "llama3-70b", "64x8xh100", "--batch", "1024", "--seq", "4096", "--precision", "bf16")
HOW = "tp=8,pp=4,dp=16,micro_batch=1,zero=1,recompute=selective"


def test_estimate_says_where_the_time_goes(meshwright: Run) -> None:
    text = meshwright(*ESTIMATE, "--plan", HOW).stdout
    for word in ("tokens/s/device", "MFU", "forward compute", "pipeline bubble", "0-127", "GiB"):
        assert word in text


def test_estimate_for_programs(meshwright: Run) -> None:
    found = json.loads(meshwright(*ESTIMATE, "--plan", HOW, "--json").stdout)
    assert found["devices"] == 512
    assert found["fits"] is True
    assert sum(found["seconds"].values()) == pytest.approx(found["step_seconds"])
    tokens = found["tokens_per_second_per_device"] * 512 * found["step_seconds"]
    assert tokens == pytest.approx(1024 * 4096)
    assert len(found["memory"]) == 4


def test_estimate_writes_a_trace_and_a_page(meshwright: Run, tmp_path: Path) -> None:
    meshwright(*ESTIMATE, "--plan", HOW, "--timeline", "step.json", "--html", "step.html")
    assert len(json.loads((tmp_path / "step.json").read_text())["traceEvents"]) > 100
    assert "</html>" in (tmp_path / "step.html").read_text()


def test_estimate_of_a_file_and_of_another_framework(meshwright: Run, plan: str) -> None:
    ours, theirs = (
        json.loads(meshwright("estimate", plan, "--json", "--runtime", how).stdout)
        for how in ("meshwright", "megatron")
    )
    assert ours["runtime"] == "meshwright"
    assert ours["step_seconds"] != theirs["step_seconds"]


def test_estimate_of_what_does_not_fit(meshwright: Run) -> None:
    short = ("estimate", "llama3-70b", "1x8xh100", "--batch", "8", "--seq", "8192", "--plan", "tp=8")
    done = meshwright(*short)
    assert done.returncode == 1
    assert "step " in done.stdout
    assert "short by" in done.stderr
    assert json.loads(meshwright(*short, "--json").stdout)["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["estimate", "llama3-70b", "8x8xh100", "--batch", "8"], "--plan"),
        (["estimate", "llama3-70b", "8x8xh100", "--plan", "tp=8"], "--batch"),
        (["estimate", "llama3-70b", "--plan", "tp=8"], "CLUSTER"),
        (["estimate", "lama3-70b", "8x8xh100", "--plan", "tp=8", "--batch", "8"], "llama3-70b"),
        (["estimate", "llama3-70b", "8x8xh100", "--plan", "tp=7", "--batch", "8"], "tp"),
        (["estimate", "llama3-70b", "8x8xh100", "--plan", "tp=8", "--batch", "8", "--runtime", "magatron"], "megatron"),
        (["estimate", "llama3-70b", "8x8xh100", "--plan", "tp=8", "--batch", "8", "--html", "no/such/f.html"], "no/such"),
        (["estimate", "missing.json"], "missing.json"),
    ],
)  # fmt: skip
def test_estimate_names_what_is_wrong(meshwright: Run, arguments: list[str], words: str) -> None:
    done = meshwright(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
