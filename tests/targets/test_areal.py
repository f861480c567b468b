"""AReaL's own grammar reads the backend strings, and its classes have the fields; AReaL itself is not imported."""

from __future__ import annotations

import ast
import re

import pytest

from tests.packages import folder, installed

if not installed("areal"):
    pytest.skip("areal is not installed: make targets", allow_module_level=True)

import lark
import yaml

from meshwright.frameworks.registry import export
from tests.targets.plans import PLANS, made


def source(name: str) -> str:
    return (folder("areal") / "api" / name).read_text()


def grammar() -> str:
    tree = ast.parse(source("alloc_mode.py"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ALLOCATION_GRAMMAR":
            return str(ast.literal_eval(node.value))
    raise AssertionError("AReaL's grammar is elsewhere")


def fields_of(name: str) -> set[str]:
    for node in ast.parse(source("cli_args.py")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            own = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            return own.union(*(fields_of(base) for base in bases))
    return set()


@pytest.mark.parametrize("name", PLANS)
def test_its_grammar_reads_the_backend(name: str) -> None:
    job, plan = made(name)
    exported = export(job, plan, "areal")
    table = yaml.safe_load(exported.files["areal.yaml"])
    backend = table["actor"]["backend"]
    lark.Lark(grammar(), parser="earley").parse(backend)
    span = exported.plan.pipelines[0].stages[0].spans[0]
    dense = dict(re.findall(r"([dptce])(\d+)", re.split(r"\|ffn", backend.partition(":")[2])[0].replace("attn", "")))
    world = 1
    for degree in dense.values():
        world *= int(degree)
    assert world == plan.devices
    assert int(dense["d"]) == span.dp
    if "ffn" in backend:
        experts = re.findall(r"[dpte](\d+)", backend.partition("ffn:")[2])
        assert int(experts[0]) * int(experts[1]) * int(experts[2]) * int(experts[3]) == world


def test_names_are_those_of_its_classes() -> None:
    for name in ("zero3", "pipeline", "interleaved"):
        table = yaml.safe_load(export(*made(name), "areal").files["areal.yaml"])
        assert set(table) <= fields_of("SFTConfig")
        assert set(table["cluster"]) <= fields_of("ClusterSpecConfig")
        assert set(table["actor"]) <= fields_of("TrainEngineConfig")
        assert set(table["actor"]["mb_spec"]) <= fields_of("MicroBatchSpec")
        assert set(table["actor"].get("fsdp", {})) <= fields_of("FSDPEngineConfig")
        assert set(table["actor"].get("megatron", {})) <= fields_of("MegatronEngineConfig")
        assert set(table["train_dataset"]) <= fields_of("TrainDatasetConfig")
