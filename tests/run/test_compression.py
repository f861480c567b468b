"""Training with compressed gradients: near one process where codecs are nearly exact, and nothing is lost where not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from meshwright.errors import InputError
from meshwright.plan import Compression
from meshwright.run.apply import apply
from meshwright.run.checkpoint import Checkpoints, latest
from meshwright.run.optimizers.choose import optimizer_for
from meshwright.run.refusals import refuse
from tests.run.families import CONFIGS
from tests.run.parity import GROUPS, batches, by_one_process, optimizer_of, plan_of, world_of
from tests.run.pool import close_all, pool

PLANS = [
    ("dp=2", "llama"),
    ("dp=2,zero=1", "llama-tied"),
    ("dp=2,zero=2,micro_batches=1", "gpt2"),
    ("dp=2,zero=3,micro_batches=1", "llama"),
    ("dp=4,zero=1,zero_group=2", "llama"),
    ("dp=4,zero=3,zero_group=2,micro_batches=1", "qwen3-moe"),
    ("dp=2,tp=2,sp=true", "llama"),
    ("dp=2,tp=2,zero=1", "gpt2"),
    ("dp=2,pp=2", "llama-tied"),
    ("dp=2,pp=2,zero=1,schedule=zero-bubble", "gpt2-deep"),
    ("dp=2,ring=2", "llama"),
    ("dp=4,ep=2", "qwen3-moe"),
]


@pytest.fixture(autouse=True, scope="module")
def _pools() -> Iterator[None]:
    yield
    close_all()


def packed(table: str, config: dict[str, Any], algorithm: str, layers: str = "embed..head", **options: Any) -> Any:
    model, plan = plan_of(table, config)
    rule = Compression(layers=layers, algorithm=algorithm, options=options)
    return model, msgspec.structs.replace(plan, compression=(rule,))


def closed(part: Any) -> None:
    for span in part.spans:
        for sync in span.synchronisers:
            sync.close()


def near_one_process(table: str, config: dict[str, Any], algorithm: str) -> tuple[Any, Any, dict[str, float], int]:
    """Losses of three steps, those of one process, how far the first gradients are off as a part of the largest, and bytes
    that were sent."""
    model, plan = packed(table, config, algorithm)
    expected, reference = by_one_process(model, "packed")[0], by_one_process(model, "packed", steps=1)[1]
    part = apply(model, plan, seed=7, groups=GROUPS)
    optimizer = optimizer_of(part.parameters())
    losses, errors = [], dict[str, float]()
    for step, (tokens, documents) in enumerate(batches("packed")):
        optimizer.zero_grad()
        losses.append(part.step(part.micro_batches(tokens, documents), tokens.numel()).loss)
        for key, box, grad in pieces(part) if step == 0 else ():
            most = reference[key].abs().max().clamp(min=1e-8)
            away = (grad - reference[key][tuple(slice(*interval) for interval in box)]).abs().max() / most
            errors[key] = max(errors.get(key, 0.0), float(away))
        optimizer.step()
    sent = sum(sync.traffic.sent for span in part.spans for sync in span.synchronisers)
    closed(part)
    return losses, expected, errors, sent


def pieces(part: Any) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Names, boxes and gradients of what this process has."""
    for span in part.spans:
        for key, module, kind in span.decoder.named():
            for box, grad in span.layouts[key].pieces(getattr(module, kind).grad):
                yield key, box, grad


@pytest.mark.parametrize(("table", "name"), PLANS)
def test_half_precision_is_near_one_process(table: str, name: str) -> None:
    world = world_of(plan_of(table, CONFIGS[name])[1])
    for losses, expected, errors, sent in pool(world).run(near_one_process, table, CONFIGS[name], "fp16"):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert max(errors.values()) < 1e-3, max(errors, key=errors.__getitem__)
        assert sent > 0
