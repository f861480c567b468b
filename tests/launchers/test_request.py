"""The command that every process runs says what was asked: read back by the verb's own parser."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.cli.running.train import command
from meshwright.cli.running.training_options import run_of
from meshwright.errors import InputError
from meshwright.launchers.request import Request, arguments
from meshwright.run.options import Training
from tests.launchers.plans import UNLIKE, request

words = st.text(st.sampled_from("abc /.$'\"-_é"), max_size=8)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "steps": st.integers(1, 10**6), "data": words.map(lambda text: f"d{text}"), "seed": st.integers(0, 2**63 - 1),
    "lr": st.floats(1e-9, 10), "warmup": st.integers(0, 99), "decay": st.sampled_from(["linear", "constant"]),
    "clip": st.floats(0, 9), "weight_decay": st.floats(0, 1), "evaluate_every": st.integers(0, 9), "output": words,
    "save_every": st.integers(0, 9), "keep": st.integers(1, 9), "resume": st.booleans(), "auto_resume": st.booleans(),
    "init_from": words, "export": words, "lora": st.integers(0, 64), "dynamic": st.booleans(), "guard": st.booleans(),
    "profile": words, "wait": st.floats(0, 99), "balance": st.sampled_from(["sample", "batch"]),
}  # fmt: skip


def test_every_field_has_an_option() -> None:
    assert set(VALUES) == {field.name for field in msgspec.structs.fields(Training)} - {"evaluate_batches"}


@settings(max_examples=150, deadline=None)
@given(st.fixed_dictionaries({"steps": VALUES["steps"]}, optional={k: v for k, v in VALUES.items() if k != "steps"}))
def test_arguments_are_read_back(fields: dict[str, Any]) -> None:
    run = Training(**fields)
    context = command.make_context("train", ["--plan", "plan.json", *arguments(run)])
    names = {field.name for field in msgspec.structs.fields(Training)}
    assert run_of({name: value for name, value in context.params.items() if name in names}) == run


def test_what_no_option_says_is_refused() -> None:
    with pytest.raises(InputError, match="evaluate_batches"):
        arguments(Training(steps=1, evaluate_batches=7))


def test_names_of_jobs() -> None:
    plan = mw.Plan.of(UNLIKE)
    assert request(plan).name == "train-tiny-llama"
    for bad in ("Train", "1st", "a_b", "-a", "a-", "x" * 41):
        with pytest.raises(InputError, match="--name"):
            Request(plan.resolve(), plan, "plan.json", Training(steps=1), bad)


def test_a_job_that_may_start_again_goes_on_by_itself() -> None:
    plan = mw.Plan.of(UNLIKE)
    assert request(plan).started_again() == request(plan)
    again = request(plan, output="run", resume=True).started_again().command
    assert again[-2:] != ["--resume", "--auto-resume"]
    assert again[-1] == "--auto-resume"
    assert "--resume" not in again
