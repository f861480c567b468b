"""Training under a plan beside the same training by one process, which knows nothing of plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.nn import functional

import meshwright as mw
from meshwright.plans.short_form import parse_short
from meshwright.run.mesh.mesh import Groups
from meshwright.run.models import Context, build, fresh
from meshwright.run.models.numerics import numerics
from meshwright.run.parallel.apply import apply

GROUPS: Groups = {}  # of a process of a pool
STEPS, BATCH, LENGTH = 3, 8, 32
Batch = tuple[torch.Tensor, torch.Tensor | None]
Shown = Literal["whole", "packed", "padded"]


def batches(shown: Shown, steps: int = STEPS) -> list[Batch]:
    """Random tokens; packed: documents of random lengths in them; padded: one, and nothing after its end."""
    stream = torch.Generator().manual_seed(5)
    found = []
    for _ in range(steps):
        tokens = torch.randint(0, 64, (BATCH, LENGTH), generator=stream)
        ends = torch.rand((BATCH, LENGTH), generator=stream) < 0.15
        inside = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (BATCH, 1), generator=stream)
        documents = {"whole": None, "packed": ends.cumsum(dim=1), "padded": inside.long() - 1}
        found.append((tokens, documents[shown]))
    return found


def optimizer_of(weights: Any) -> torch.optim.Optimizer:
    # Adam divides a gradient by its own size: where it is nothing but rounding, `eps` keeps it from becoming a step.
    return torch.optim.AdamW(weights, lr=1e-3, eps=1e-6)


def nonzero(key: str, shape: Sequence[int]) -> torch.Tensor:
    """Of an adapter's B, which is zero in a fresh one: then A would have no gradient."""
    return fresh(f"{key} of a trained adapter", shape, 0.05, 7)


def values_of(model: mw.Model) -> Callable[[str, Sequence[int]], torch.Tensor]:
    """Fresh ones, but of adapters that already add something."""
    deviation = numerics(model).initializer
    return lambda key, shape: nonzero(key, shape) if key.endswith(".lora.b") else fresh(key, shape, deviation, 7)


def by_one_process(
    model: mw.Model, shown: Shown, lora: int = 0, steps: int = STEPS
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of some steps, and the gradients of the last one by name: a plain loop with PyTorch's own loss."""
    decoder = build(model, seed=7, lora=lora)
    for key, module, kind in decoder.named() if lora else ():
        if key.endswith(".lora.b"):
            getattr(module, kind).data.copy_(nonzero(key, getattr(module, kind).shape))
    optimizer = optimizer_of(decoder.parameters())
    losses = []
    for tokens, documents in batches(shown)[:steps]:
        optimizer.zero_grad()
        logits = decoder(tokens, Context.of(tokens, documents, divisor=tokens.numel()))
        targets = tokens[:, 1:]
        if documents is not None:
            targets = targets.where((documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0), -100)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss / tokens.numel()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, {key: getattr(module, kind).grad for key, module, kind in decoder.named()}


def plan_of(table: str | dict[str, Any], config: dict[str, Any]) -> tuple[mw.Model, mw.Plan]:
    """From the short form, or a table of it; as many devices as it needs."""
    model = mw.Model.from_config(config)
    short = _short(table) if isinstance(table, str) else dict(table)
    degrees = [int(short.get(name, 1)) for name in ("dp", "tp", "ulysses", "ring", "pp")]
    world = short.pop("world", 0) or int(torch.tensor(degrees).prod())
    job = mw.Job(model, mw.Cluster.preset(f"{world}xh100"), global_batch=BATCH, seq_len=LENGTH, precision="fp32")
    if "pipelines" in short:
        return model, mw.Plan.of({"format": "meshwright-plan", "version": 1, "job": job.written(), **short}, job)
    return model, mw.Plan.of({"micro_batches": 2, "zero": 0, **short}, job)


def _short(text: str) -> dict[str, Any]:
    table = parse_short(text)
    if "order" in table:
        table["order"] = table["order"].split("-")
    return table


def world_of(plan: mw.Plan) -> int:
    return plan.devices


def on_a_rank(
    table: str | dict[str, Any], config: dict[str, Any], shown: Shown, lora: int = 0, *, splits: bool = True
) -> tuple[list[float], list[float], dict[str, float]]:
    """Losses under a plan and of one process, and how far off the gradients are, as a part of the largest.

    Not `splits`: as under a PyTorch that cannot run backward passes in halves.
    """
    model, plan = plan_of(table, config)
    expected, reference = by_one_process(model, shown, lora)
    part = apply(model, plan, seed=7, groups=GROUPS, values=values_of(model) if lora else None, lora=lora)
    for stage in part.executor.stages:
        stage.splits = stage.splits and splits
    optimizer = optimizer_of(part.parameters())
    losses = []
    for tokens, documents in batches(shown):
        optimizer.zero_grad()
        losses.append(part.step(part.micro_batches(tokens, documents), tokens.numel()).loss)
        optimizer.step()
    errors: dict[str, float] = {}
    for span in part.spans:
        for key, module, kind in span.decoder.named():
            weight = getattr(module, kind)
            if not weight.requires_grad:
                continue
            most = reference[key].abs().max().clamp(min=1e-8)
            for box, grad in span.layouts[key].pieces(weight.grad):
                whole = reference[key][tuple(slice(*interval) for interval in box)]
                errors[key] = max(errors.get(key, 0.0), float((grad - whole).abs().max() / most))
    return losses, expected, errors
