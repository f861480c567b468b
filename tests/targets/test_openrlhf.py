"""Every flag is one that OpenRLHF's trainer lists; OpenRLHF itself is not imported."""

from __future__ import annotations

import argparse
import ast
import shlex
from typing import Any

import pytest

from tests.packages import folder, installed

if not installed("openrlhf"):
    pytest.skip("openrlhf is not installed: make targets", allow_module_level=True)

from meshwright.frameworks.registry import export
from tests.targets.plans import PLANS, made


def parser() -> argparse.ArgumentParser:
    """The trainer's own arguments: its calls of add_argument, made again with what they say literally."""
    tree = ast.parse((folder("openrlhf") / "cli" / "train_sft.py").read_text())
    made_again = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            keywords: dict[str, Any] = {"type": str}
            for keyword in node.keywords:
                if keyword.arg in {"action", "choices", "nargs"}:
                    keywords[keyword.arg] = ast.literal_eval(keyword.value)
                elif keyword.arg == "type" and isinstance(keyword.value, ast.Name):
                    keywords["type"] = {"int": int, "float": float}.get(keyword.value.id, str)
            if "action" in keywords:
                del keywords["type"]
            made_again.add_argument(*(ast.literal_eval(argument) for argument in node.args), **keywords)
    return made_again


@pytest.mark.parametrize("name", PLANS)
def test_flags_are_its_own(name: str) -> None:
    job, plan = made(name)
    exported = export(job, plan, "openrlhf")
    words = shlex.split(exported.files["openrlhf.sh"])
    flags = [word for word in words[words.index("openrlhf.cli.train_sft") + 1 : -1] if word.strip()]
    said = vars(parser().parse_args(flags))
    (pipeline,) = exported.plan.pipelines
    span = pipeline.stages[0].spans[0]
    assert said["ds.zero_stage"] == span.zero
    assert (said["ds.tensor_parallel_size"], said["ds.ring_attn_size"]) == (span.tp, span.ring)
    # strategy.accumulated_gradient (utils/deepspeed/deepspeed.py): batch x tp x ring / micro-batch / world
    steps = said["train.batch_size"] * span.tp * span.ring // said["train.micro_batch_size"] // plan.devices
    assert steps == pipeline.micro_batches
    assert said["ds.packing_samples"] or span.ring == 1
