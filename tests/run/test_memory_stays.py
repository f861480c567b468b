"""A step leaves nothing behind, whatever a plan recomputes, offloads or swaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.run.memory.host_memory import malloc_bytes
from meshwright.run.memory.offload import Place, offload
from meshwright.run.memory.offload_share import OffloadShare
from meshwright.run.memory.recompute import recompute
from meshwright.run.models import Context, build
from tests.run.families import CONFIGS

# Attention, norms, gates and routers all save their own outputs somewhere.
_FAMILIES = ("llama", "qwen3", "gpt2", "qwen3-moe", "deepseek-v3")
_WIDE = {"vocab_size": 64, "max_position_embeddings": 128, "n_positions": 128}
_NOISE = 32 * 1024  # bytes; the smallest activation of these models has 16 KiB, and a leak keeps one a step
_HOWS: tuple[Any, ...] = ("none", "selective", "full", ("norm",), ("core",), ("qkv", "norm", "core"), ("activation",))


def _grows(name: str, how: Any, *, kept: float = 0.0, lora: int = 0, abandoned: bool = False) -> int:
    """Return how many bytes more are held after the last steps than after five; `abandoned`: steps have no backward pass."""
    model = mw.Model.from_config({**CONFIGS[name], **_WIDE})
    decoder = build(model, lora=lora)
    known = {op.name for layer in model.layers for op in layer.ops}
    recompute(decoder, dict.fromkeys(model.layers, how if isinstance(how, str) else tuple(set(how) & known)))
    if kept:
        offload(decoder, [Place("cpu", OffloadShare(kept))])
    tokens = torch.randint(0, 64, (4, 128), generator=torch.Generator().manual_seed(1))
    held = []
    for _ in range(12):
        loss = decoder(tokens, Context.of(tokens, divisor=tokens.numel()), tokens)
        if not abandoned:
            loss.backward()
        del loss
        decoder.zero_grad(set_to_none=True)
        held.append(malloc_bytes())
    return max(held[-3:]) - held[4]


@pytest.mark.parametrize("how", _HOWS, ids=str)
@pytest.mark.parametrize("name", _FAMILIES)
def test_recompute_leaves_nothing(name: str, how: Any) -> None:
    more = _grows(name, how)
    assert more < _NOISE, f"{more:,} bytes more after seven steps"


@pytest.mark.parametrize("least", [1, 2**40], ids=["all offloaded", "all too small"])
@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_offload_leaves_nothing(how: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.run.memory.offload.LEAST", least)
    more = _grows("llama", how, kept=1.0)
    assert more < _NOISE, f"{more:,} bytes more after seven steps"


def test_offload_of_a_part_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.run.memory.offload.LEAST", 1)
    more = _grows("qwen3-moe", "selective", kept=0.5)
    assert more < _NOISE, f"{more:,} bytes more after seven steps"


def test_adapters_leave_nothing() -> None:
    more = _grows("llama", "selective", lora=4)
    assert more < _NOISE, f"{more:,} bytes more after seven steps"


@pytest.mark.parametrize("kept", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("least", [1, 2**40], ids=["offloaded", "too small"])
def test_an_abandoned_step_leaves_nothing(kept: float, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.run.memory.offload.LEAST", least)
    more = _grows("qwen3-moe", ("qkv", "activation"), kept=kept, abandoned=True)
    assert more < _NOISE, f"{more:,} bytes more after seven steps"
