"""Any plan trains to the losses and gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError, PlanError
from meshwright.plans.document import Compression
from meshwright.run.models import Context, build
from meshwright.run.parallel.apply import apply
from meshwright.run.parallel.stage import next_tokens
from tests.run.families import CONFIGS
from tests.run.parity import GROUPS, STEPS, Shown, batches, on_a_rank, plan_of, world_of
from tests.run.plans import FULL, drawn
from tests.run.pool import pool

PLANS = {
    "dp=2": ("llama", "gpt2", "qwen3-moe", "deepseek-v3"),
    "tp=2,sp=false": ("llama", "gpt2", "qwen3", "llama-tied", "mistral"),
    "tp=2,sp=true": ("llama", "gpt2", "qwen3", "llama-tied", "qwen2"),
    "ulysses=2": ("llama", "gpt2", "mistral", "qwen3-moe", "deepseek-v3"),
    "ring=2": ("llama", "gpt2", "mistral", "qwen3-moe", "deepseek-v3"),
    "dp=2,tp=2,sp=false": ("llama", "gpt2"),
    "dp=2,tp=2,sp=true,order=dp-tp-ulysses-ring": ("llama",),
    "ulysses=2,ring=2": ("llama", "qwen3", "mixtral"),
    "tp=2,sp=true,ring=2": ("llama", "gpt2", "qwen3"),
    "ulysses=4": ("llama",),
    "ring=4": ("llama", "mistral"),
    "dp=2,ulysses=2": ("qwen2-moe",),
    "dp=2,tp=2,sp=true,ulysses=2": ("gpt2",),
    "dp=2,zero=1": ("llama", "gpt2", "mixtral"),
    "dp=2,zero=2": ("llama", "deepseek-v3"),
    "dp=2,zero=3": ("llama", "gpt2", "qwen3-moe", "deepseek-v3"),
    "dp=2,zero=3,recompute=selective": ("qwen2-moe",),
    "ulysses=2,zero=3": ("qwen3",),
    "dp=2,ring=2,zero=2": ("llama",),
    "dp=2,tp=2,sp=true,zero=3": ("llama", "gpt2", "qwen3"),
    "dp=2,tp=2,sp=false,zero=1": ("llama-tied",),
    "dp=2,ulysses=2,ring=2,zero=3": ("llama",),
    "dp=2,ep=2": ("mixtral", "qwen2-moe", "deepseek-v3"),
    "dp=4,ep=2": ("qwen3-moe",),
    "ulysses=2,ep=2": ("qwen3-moe",),
    "ring=2,dp=2,ep=4": ("mixtral",),
    "dp=2,ep=2,zero=3": ("qwen3-moe", "deepseek-v3"),
    "dp=4,ep=2,zero=2": ("mixtral",),
    "tp=2,sp=true,ep=2": ("qwen3-moe", "qwen2-moe"),
    "tp=2,sp=false,ep=2": ("mixtral", "qwen2-moe"),
    "tp=2,sp=true,ep=1,etp=2": ("mixtral",),
    "dp=2,tp=2,sp=true,ep=2,etp=2": ("qwen3-moe",),
    "dp=2,tp=2,sp=false,ep=4": ("qwen2-moe",),
    "dp=2,tp=2,sp=true,ep=2,zero=1": ("qwen3-moe",),
    "tp=4,sp=true": ("llama", "gpt2"),
    "tp=4,sp=false": ("qwen3",),
    "dp=2,tp=4,sp=true,zero=3": ("llama",),
    "tp=2,sp=true,ep=2,dp=2": ("deepseek-v3",),
    "tp=4,sp=false,zero=0": ("deepseek-v3-yarn",),
    "dp=4,zero=3,zero_group=2": ("llama",),
    "dp=4,zero=2,zero_group=2,ep=2": ("qwen3-moe",),
    "dp=4,zero=1,zero_group=2,tp=2": ("gpt2",),
    "pp=2,schedule=gpipe": ("llama", "gpt2", "deepseek-v3"),
    "pp=2": ("llama-tied", "mixtral"),
    "pp=4,micro_batches=4": ("llama-deep",),
    "pp=2,schedule=interleaved,virtual=2": ("llama-deep", "tied-deep"),
    "pp=2,schedule=zero-bubble": ("gpt2-deep", "moe-deep"),
    "pp=2,schedule=zero-bubble,virtual=2,micro_batches=4": ("llama-deep",),
    "pp=2,schedule=zbv,virtual=2,micro_batches=4": ("llama-deep", "tied-deep"),
    "pp=2,schedule=dualpipev,virtual=2,micro_batches=4": ("llama-deep", "moe-deep"),
    "pp=2,tp=2,sp=true,schedule=zero-bubble": ("gpt2-deep",),
    "pp=2,dp=2,zero=3": ("llama-deep",),
    "pp=2,dp=2,zero=2,schedule=interleaved,virtual=2": ("llama-deep",),
    "pp=2,dp=2,zero=1,schedule=zero-bubble": ("llama-deep",),
    "pp=2,dp=2,ep=2,zero=3,schedule=zbv,virtual=2,micro_batches=4": ("moe-deep",),
    "pp=2,ulysses=2,ring=2": ("llama",),
    "pp=2,dp=2,tp=2,sp=true,zero=1": ("gpt2",),
    "micro_batches=4,dp=2,ep=2": ("moe-balanced",),
    "micro_batches=1,tp=2,sp=true": ("moe-balanced",),
    "tp=2,sp=false,ulysses=2,zero=2": ("moe-balanced",),
    "pp=2,ring=2": ("moe-balanced",),
    "dp=2,zero=3,recompute=full": ("llama", "qwen3-moe", "gpt2"),
    "tp=2,sp=true,recompute=selective": ("qwen3-moe", "llama-tied", "gpt2"),
    "pp=2,recompute=norm+qkv+core,schedule=zero-bubble": ("llama-deep",),
    "tp=2,sp=true,recompute=norm+gate+activation": ("llama", "qwen3"),
    "pp=2,schedule=zbv,virtual=2,micro_batches=4,recompute=full": ("tied-deep",),
    "dp=2,tp=2,sp=true,ep=2,recompute=full": ("deepseek-v3",),
    "dp=2,zero=3,recompute=expert_down+expert_activation": ("moe-balanced",),
}
CASES = [(text, name) for text, names in PLANS.items() for name in names]
CASES += [(title, name) for title, (_, names) in FULL.items() for name in names]


def check(table: str | dict[str, Any], name: str, shown: Shown, run: Callable[..., Any] = on_a_rank) -> None:
    _, plan = plan_of(table, CONFIGS[name])
    for losses, expected, errors in pool(world_of(plan)).run(run, table, CONFIGS[name], shown):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert len(set(losses)) == STEPS
        assert {key: error for key, error in errors.items() if error > 1e-4} == {}


def test_there_are_enough_plans() -> None:
    assert len(PLANS) + len(FULL) >= 60


@pytest.mark.parametrize(("text", "name"), CASES)
def test_losses_and_gradients_of_one_process(text: str, name: str) -> None:
    check(FULL[text][0] if text in FULL else text, name, "packed")


# Samples of one document are packed ones without edges inside: a part of the plans shows that.
@pytest.mark.parametrize(("text", "name"), CASES[1::3])
def test_whole_samples(text: str, name: str) -> None:
    check(FULL[text][0] if text in FULL else text, name, "whole")


@pytest.mark.parametrize(("text", "name"), CASES[::6])
def test_padded_samples(text: str, name: str) -> None:
    check(FULL[text][0] if text in FULL else text, name, "padded")


def in_one_piece(table: str, config: dict[str, Any], shown: Shown) -> Any:
    return on_a_rank(table, config, shown, splits=False)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("pp=2,schedule=zero-bubble", "gpt2-deep"),
        ("pp=2,dp=2,ep=2,zero=3,schedule=zbv,virtual=2,micro_batches=4", "moe-deep"),
    ],
)
def test_backward_passes_that_cannot_be_split(text: str, name: str) -> None:
    check(text, name, "packed", in_one_piece)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    drawn(), st.sampled_from(["llama-deep", "tied-deep", "gpt2-deep", "moe-deep"]), st.sampled_from(["whole", "packed"])
)
def test_random_plans(table: dict[str, Any], name: str, shown: Shown) -> None:
    try:
        plan_of(table, CONFIGS[name])
    except PlanError:
        assume(False)
    check(table, name, shown)


def test_what_cannot_be_run_yet_is_refused_by_name() -> None:
    model, plan = plan_of("micro_batches=2", CONFIGS["llama"])
    packed = (Compression(layers="block.0", algorithm="sign"),)
    with pytest.raises(InputError, match=r"compression\[0\].algorithm: unknown codec 'sign'"):
        apply(model, msgspec.structs.replace(plan, compression=packed))


def test_a_plan_for_other_processes_is_refused() -> None:
    with pytest.raises(InputError, match=r"there are 1 processes.*valid: 2, one for each"):
        apply(*plan_of("dp=2", CONFIGS["llama"]))


def summed_by_hand(table: str, config: dict[str, Any]) -> float:
    """How far gradients of matrices are from float32 sums of those that each micro-batch has alone.

    Those of norms are float32 as they are made: alone they would be rounded before they are summed.
    """
    model, plan = plan_of(table, config)
    part = apply(model, plan, seed=7, groups=GROUPS, dtype=torch.bfloat16)
    tokens = batches("whole")[0][0]
    part.step(part.micro_batches(tokens), tokens.numel())
    decoder = build(model, seed=7)
    for weight in decoder.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    sums: dict[str, Any] = {}
    for some in tokens.chunk(plan.pipelines[0].micro_batches):
        decoder.zero_grad()
        (decoder(some, Context.of(some), next_tokens(some)) / tokens.numel()).backward()
        for key, module, kind in decoder.named():
            sums[key] = sums.get(key, 0) + getattr(module, kind).grad.float()
    found = {key: getattr(module, kind).grad for span in part.spans for key, module, kind in span.decoder.named()}
    errors = [(grad - sums[key]).abs().max() / sums[key].abs().max() for key, grad in found.items() if grad.dim() > 1]
    return float(max(errors))


@pytest.mark.parametrize("text", ["micro_batches=8", "pp=2,schedule=zero-bubble,micro_batches=8"])
def test_gradients_of_micro_batches_add_up_in_float32(text: str) -> None:
    world = world_of(plan_of(text, CONFIGS["llama-deep"])[1])
    for error in pool(world).run(summed_by_hand, text, CONFIGS["llama-deep"]):
        assert error < 1e-6
