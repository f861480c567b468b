"""Any plan trains to the losses and gradients of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import meshwright as mw
from meshwright.errors import InputError
from meshwright.run.apply import Parallel, apply
from meshwright.run.lane import ONE, Groups
from meshwright.run.models import build
from meshwright.run.tensor_parallel import cut
from tests.run.families import CONFIGS
from tests.run.pool import close_all, pool

GROUPS: Groups = {}  # of a process of a pool
STEPS, BATCH, LENGTH, MICRO_BATCHES = 3, 8, 32, 2
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
}


@pytest.fixture(autouse=True, scope="module")
def _pools() -> Iterator[None]:
    yield
    close_all()


def batches(packed: bool) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    stream = torch.Generator().manual_seed(5)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(0, 64, (BATCH, LENGTH), generator=stream)
        ends = torch.rand((BATCH, LENGTH), generator=stream) < 0.15
        found.append((tokens, ends.cumsum(dim=1) if packed else None))
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Of all shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(part: Parallel, packed: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some steps, and the gradients of the last one."""
    # Adam divides a gradient by its own size: where it is nothing but rounding, `eps` keeps it from becoming a step.
    optimizer = torch.optim.AdamW(part.decoder.parameters(), lr=1e-3, eps=1e-6)
    losses = []
    for tokens, documents in batches(packed):
        optimizer.zero_grad()
        total = torch.zeros(())
        for i in range(MICRO_BATCHES):
            some, which = (
                None if one is None else part.own_samples(one.chunk(MICRO_BATCHES)[i]) for one in (tokens, documents)
            )
            part.before(last=i + 1 == MICRO_BATCHES)
            loss = part.loss(some, which) / tokens.numel()
            loss.backward()
            total += loss.detach()
        part.sum_gradients()
        if part.lane.replicas.size > 1:
            dist.all_reduce(total, group=part.lane.replicas.group)
        losses.append(float(total))
        optimizer.step()
    return losses, {name: whole(weight.grad) for name, weight in part.decoder.named_parameters()}


def plan_of(text: str, config: dict[str, Any]) -> tuple[mw.Model, mw.Plan]:
    model = mw.Model.from_config(config)
    table: dict[str, Any] = {}
    for name, value in (item.split("=") for item in text.split(",")):
        table[name] = (
            value.split("-") if name == "order" else value == "true" if value in ("true", "false") else int(value)
        )
    degrees = [table.get(name, 1) for name in ("dp", "tp", "ulysses", "ring")]
    world = int(torch.tensor(degrees).prod())
    job = mw.Job(model, mw.Cluster.preset(f"{world}xh100"), global_batch=BATCH, seq_len=LENGTH, precision="fp32")
    return model, mw.Plan.of({"micro_batches": MICRO_BATCHES, "zero": 0, **table}, job)


def on_a_rank(text: str, config: dict[str, Any], packed: bool) -> tuple[list[float], list[float], dict[str, float]]:
    """Losses under a plan and of one process, and how far off the gradients are, as a part of the largest."""
    model, plan = plan_of(text, config)
    expected, reference = trained(Parallel(build(model, seed=7), ONE), packed)
    part = apply(model, plan, seed=7, groups=GROUPS)
    losses, gradients = trained(part, packed)
    pieces = build(model)  # the whole gradients, cut as the weights are
    with torch.no_grad():
        for name, weight in pieces.named_parameters():
            weight.copy_(reference[name])
    cut(pieces, part.lane)
    errors = {}
    for name, piece in pieces.named_parameters():
        assert piece.shape == gradients[name].shape
        errors[name] = float(
            (gradients[name] - piece.detach()).abs().max() / reference[name].abs().max().clamp(min=1e-8)
        )
    return losses, expected, errors


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(("text", "name"), [(text, name) for text, names in PLANS.items() for name in names])
def test_losses_and_gradients_of_one_process(text: str, name: str, packed: bool) -> None:
    _, plan = plan_of(text, CONFIGS[name])
    world = plan.pipelines[0].stages[0].spans[0].devices
    for losses, expected, errors in pool(world).run(on_a_rank, text, CONFIGS[name], packed):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert len(set(losses)) == STEPS
        assert {key: error for key, error in errors.items() if error > 1e-4} == {}


def test_what_cannot_be_run_yet_is_refused_by_name() -> None:
    model, _ = plan_of("dp=2", CONFIGS["llama"])
    job = mw.Job(model, mw.Cluster.preset("2xh100"), global_batch=BATCH, seq_len=LENGTH)
    for table, field in (({"pp": 2}, "pp"), ({"recompute": "full", "dp": 2}, "recompute")):
        with pytest.raises(InputError, match=f"{field}: .*cannot be run yet"):
            apply(model, mw.Plan.of({"micro_batches": 2, **table}, job))
