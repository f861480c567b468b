"""Any valid plan survives being saved and loaded, keeps every rule, and matches the published schema."""

from __future__ import annotations

import copy
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings

from meshwright.errors import DiskFull
from meshwright.plans import Plan, schema
from tests.conftest import ROOT
from tests.plans.strategies import plans

FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@cache
def validator() -> Any:
    published = json.loads((ROOT / "docs/schema/plan-v1.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(published)
    return jsonschema.Draft202012Validator(published)


@FEW
@given(plans())
def test_a_valid_plan_survives(tmp_path_factory, table: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    plan = Plan.of(copy.deepcopy(table))
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    again = Plan.load(path)
    assert again == plan
    assert again.to_json() == path.read_text()
    # Every fact of the table is in the document, not only in what was made of it.
    _contains(json.loads(path.read_text()), table)


# What the document may leave out, because it is what absence means.
ABSENT = {"order": ["tp", "ulysses", "ring", "dp"], "offload": {"activations": 0, "optimizer": 0.0}}


def _contains(full: Any, part: Any, where: str = "$") -> None:
    if isinstance(part, dict):
        for key, value in part.items():
            if key not in full:
                assert value == ABSENT[key], f"{where}.{key}"
            else:
                _contains(full[key], value, f"{where}.{key}")
    elif isinstance(part, list) and part and isinstance(part[0], dict):
        assert len(full) == len(part), where
        for i, value in enumerate(part):
            _contains(full[i], value, f"{where}[{i}]")
    else:
        assert full == part, where


@FEW
@given(plans())
def test_a_valid_plan_matches_the_published_schema(table: dict[str, Any]) -> None:
    validator().validate(table)
    validator().validate(Plan.of(table).to_table())


def test_the_published_schema_is_the_one_in_the_code() -> None:
    assert json.loads((ROOT / "docs/schema/plan-v1.schema.json").read_text()) == schema()


def test_the_schema_accepts_the_short_form_and_refuses_typos() -> None:
    assert validator().is_valid({"model": "llama3-70b", "cluster": "8x8xh100", "global_batch": 512, "tp": 4, "pp": 2})
    assert not validator().is_valid({"tp": 4, "pq": 2})
    assert not validator().is_valid({"tp": 0})


def test_one_change_is_one_line_of_text() -> None:
    """Diffable: each span stands on a line of its own."""
    short = {"model": "llama3-70b", "cluster": "8x8xh100", "global_batch": 512, "seq_len": 8192, "tp": 4, "pp": 8}
    table = Plan.of(short).to_table()
    changed = copy.deepcopy(table)
    changed["pipelines"][0]["stages"][3]["spans"][0] |= {"recompute": "selective", "offload": {"optimizer": 0.5}}
    before, after = Plan.of(table).to_json().splitlines(), Plan.of(changed).to_json().splitlines()
    assert len(before) == len(after)
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    plan = Plan.of({"model": "tiny-llama", "cluster": "4xh100", "global_batch": 8})
    path = tmp_path / "plan.json"
    path.write_text("the old plan")

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(DiskFull, match="No space left"):
        plan.save(path)
    assert path.read_text() == "the old plan"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_what_editors_and_tools_add_is_kept() -> None:
    table = Plan.of({"model": "tiny-llama", "cluster": "4xh100", "global_batch": 8}).to_table()
    table = {"$schema": "plan.schema.json", **table, "search": {}, "estimate": {"step_time_s": 1.5}}
    assert Plan.of(table).to_table() == table


def test_paths_are_seen_from_the_plan_and_become_part_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 8, "intermediate_size": 128}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "lab.toml").write_text('[[group]]\ndevice = "h100"\n')
    plan_path = tmp_path / "mine" / "plan.json"
    plan_path.write_text(json.dumps({"model": "config.json", "cluster": "lab.toml", "global_batch": 8}))
    plan = Plan.load(plan_path)
    plan.save(tmp_path / "elsewhere.json")
    (folder / "config.json").unlink()
    again = Plan.load(tmp_path / "elsewhere.json")
    assert again == plan
    job = again.resolve()
    assert (job.model.name, job.cluster.name, job.cluster.devices) == ("mine", "lab", 8)


def test_class_names_of_an_image_model_do_not_fill_the_plan(tmp_path: Path) -> None:
    from meshwright.models import Model, presets

    config = presets()["vit-base"].config | {"id2label": {str(i): f"class {i}" for i in range(1000)}}
    del config["num_labels"]
    model = Model.from_config(config)
    assert model.parameters == Model.preset("vit-base").parameters == Model.load(model.reference).parameters
    assert len(json.dumps(dict(model.reference))) < 1000  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_only_regular_files_are_replaced(tmp_path: Path, kind: str) -> None:
    import threading

    from meshwright.base.files import write_text

    path, real = tmp_path / "out.json", tmp_path / "real.json"
    received = []
    if kind == "link":
        real.write_text("old")
        path.symlink_to(real)
        write_text(path, "new")
        assert path.is_symlink()
        assert real.read_text() == "new"
        return
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: received.append(path.read_text()))
    reader.start()
    write_text(path, "new")
    reader.join(10)
    assert received == ["new"]
    assert path.is_fifo()
