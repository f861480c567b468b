"""Time of one layer: many strategies at once equal one at a time; bytes on the wire as the papers count them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from meshwright.clusters import Cluster
from meshwright.cost.constants import DEFAULT
from meshwright.cost.layers.collectives import Fabric, gather_seconds, reduce_seconds
from meshwright.cost.layers.layer import LayerTime, Placement, _op_work, layer_time
from meshwright.cost.layers.operators import Chip
from meshwright.cost.runtime import runtime
from meshwright.models import Model, Slice
from tests.conftest import ROOT

GROUP = Cluster.preset("64x8xh100").groups[0]
NEMO = runtime("nemo")
CHIP = Chip.of(GROUP.device, "bf16", NEMO)
FABRIC = Fabric.of(GROUP)
MODELS = ("llama3-70b", "deepseek-v3", "gpt3-175b", "t5-large")


def price(
    name: str, layer: str, cut: Slice, place: Placement, recompute: object = "none", how: str = "nemo"
) -> LayerTime:
    found = Model.preset(name).layer(layer)
    return layer_time(found, cut, CHIP, FABRIC, runtime(how), place, recompute)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_thousands_at_once_equal_one_at_a_time(name: str, recompute: str) -> None:
    grid = np.array(
        [(tp, u, r, mb, sp) for tp in (1, 2, 8) for u in (1, 2) for r in (1, 4) for mb in (1, 4) for sp in (0, 1)]
    )
    tp, ulysses, ring, mb, sp = grid.T
    many = Slice(mb, 8192, "bf16", tp, sp, ulysses, ring, np.minimum(tp * ulysses, 8), 1)
    place = Placement(1, tp, tp * ulysses, 1)
    for layer in {layer.kind: layer for layer in Model.preset(name).layers}.values():
        together = layer_time(layer, many, CHIP, FABRIC, NEMO, place, recompute)  # type: ignore[arg-type]
        for i, (t, u, r, m, s) in enumerate(grid.tolist()):
            one = Slice(m, 8192, "bf16", t, bool(s), u, r, min(t * u, 8), 1)
            apart = layer_time(layer, one, CHIP, FABRIC, NEMO, Placement(1, t, t * u, 1), recompute)  # type: ignore[arg-type]
            for part in ("forward", "backward"):
                whole = np.broadcast_to(getattr(together, part), len(grid))[i]
                assert whole == pytest.approx(float(getattr(apart, part)), rel=1e-9), (layer.name, part)


@pytest.mark.parametrize("sp", [False, True])
def test_tensor_parallel_bytes(sp: bool) -> None:
    """Shoeybi et al., 2019: one all-reduce of b s h per layer and pass; Korthikanti et al., 2022: the same as two halves,
    and one more gather in the backward pass."""
    moved = 2 * 4096 * 8192
    found = price("llama3-70b", "block.0.mlp", Slice(1, 4096, tp=8, sp=sp), Placement()).transfers["tp"]
    half, whole = gather_seconds(FABRIC, moved, 8), reduce_seconds(FABRIC, moved, 8)
    assert found.forward == pytest.approx(2 * half if sp else whole)
    assert found.backward == pytest.approx(3 * half if sp else whole)


def test_full_recomputation_repeats_the_forward_pass() -> None:
    cut = Slice(1, 4096, tp=8, sp=True)
    plain, again = (price("llama3-70b", "block.0.mlp", cut, Placement(), level) for level in ("none", "full"))
    assert again.work.recompute == pytest.approx(plain.work.forward)
    assert again.backward - plain.backward == pytest.approx(plain.forward)


def test_named_operators_repeat_only_themselves() -> None:
    cut = Slice(1, 4096)
    up, both = (price("llama3-70b", "block.0.mlp", cut, Placement(), names) for names in (["up"], ["gate", "up"]))
    assert both.work.recompute == pytest.approx(2 * up.work.recompute)
    assert 0 < both.work.recompute < both.work.forward


def test_backward_is_about_twice_forward() -> None:
    found = price("llama3-70b", "block.0.attention", Slice(1, 8192), Placement())
    assert 1.9 < found.backward / found.forward < 2.6


def test_ring_attention_hides_under_long_sequences_only() -> None:
    """Ring 8 over nodes: 128K tokens hide the keys and values, 2K do not."""
    place = Placement(ring=8)
    long, short = (
        price("llama3-70b", "block.0.attention", Slice(1, n, ring=8), place).transfers["ring"] for n in (131072, 2048)
    )
    assert long.forward_exposed == pytest.approx(DEFAULT.contention * long.forward)  # hidden, but not for nothing
    assert short.forward_exposed > 0.5 * short.forward
    assert long.backward == 2 * long.forward


def test_ulysses_moves_queries_keys_values_and_context() -> None:
    """Two all-to-alls, each device sending its share: queries with keys and values, then the context; 2 bytes each."""
    found = price("llama3-70b", "block.0.attention", Slice(1, 8192, ulysses=8), Placement()).transfers["ulysses"]
    elements = (8192 + 2 * 1024 + 8192) * 8192 / 8
    wire = 2 * elements * 7 / 8 / (450e9 * DEFAULT.nvlink)
    latency = DEFAULT.collective + 2e-6 * DEFAULT.hop
    assert found.forward == pytest.approx(wire + 2 * latency)


def test_unfused_attention_pays_for_its_scores() -> None:
    """At 8K tokens the score matrices dominate; a fused kernel is several times faster."""
    old, new = (
        price("gpt3-175b", "block.0.attention", Slice(1, 8192, fused_attention=how == "nemo"), Placement(), how=how)
        for how in ("megatron-2021", "nemo")
    )
    scores = 96 * 8192**2
    assert old.work.forward - new.work.forward > 8 * scores / GROUP.device.memory_bandwidth * 0.9


def test_sliding_windows_are_cheaper() -> None:
    layer = Model.preset("mistral-7b").layer("block.0.attention")
    wide = replace(layer, ops=tuple(replace(op, window=0) for op in layer.ops))
    both = [layer_time(one, Slice(1, 65536), CHIP, FABRIC, NEMO, Placement()) for one in (layer, wide)]
    assert both[0].forward < 0.6 * both[1].forward


def test_experts_exchange_only_between_their_devices() -> None:
    one, eight, many = (
        price("deepseek-v3", "block.10.moe", Slice(1, 4096, ep=ep), Placement()).transfers.get("ep")
        for ep in (1, 8, 64)
    )
    assert one is None
    assert eight is not None
    assert many is not None
    assert many.forward > 3 * eight.forward  # the network is slower than NVLink


def test_an_unbalanced_ring_waits_for_its_last_device() -> None:
    """Contiguous pieces under a causal mask: of r devices the last does 2 r - 1 of every r^2 / r parts (counted by hand)."""
    ring, tokens = 4, 65536
    piece = tokens // ring
    pairs = [sum(min(q + 1, tokens) for q in (i * piece, (i + 1) * piece - 1)) / 2 * piece for i in range(ring)]
    cut, place = Slice(1, tokens, ring=ring), Placement(ring=1)
    layer = Model.preset("llama3-8b").layer("block.0.attention")
    even, odd = (
        layer_time(layer, cut, CHIP, FABRIC, replace(NEMO, balanced_ring=how), place).work.input_gradient
        for how in (True, False)
    )
    other = sum(
        float(_op_work(op, layer, cut, tokens, CHIP, NEMO).input_gradient) for op in layer.ops if op.kind != "attention"
    )
    assert (odd - other) / (even - other) == pytest.approx(max(pairs) / (sum(pairs) / ring), rel=0.01)


def test_memory_of_thousands_at_once() -> None:
    tp, mb = np.array([1, 2, 4, 8]), np.array([1, 2, 1, 4])
    many = Slice(mb, 4096, "bf16", tp, tp > 1)
    for layer in {layer.kind: layer for name in MODELS[:3] for layer in Model.preset(name).layers}.values():
        for recompute in ("none", "selective", "full"):
            together = np.broadcast_to(layer.kept_bytes(many, recompute), 4)
            apart = [
                layer.kept_bytes(Slice(int(m), 4096, "bf16", int(t), bool(t > 1)), recompute)
                for t, m in zip(tp, mb, strict=True)
            ]
            assert together == pytest.approx(apart)
        assert list(np.broadcast_to(layer.parameters_on(many), 4)) == [
            layer.parameters_on(Slice(tp=int(t))) for t in tp
        ]


def test_whole_blocks_against_the_h200() -> None:
    """25 compiled blocks of five Llamas, forward and backward, measured on an H200 (benchmarks/blocks_on_device.py)."""
    how, home = runtime("meshwright"), Cluster.preset("1x1xh200").groups[0]
    chip, fabric = Chip.of(home.device, "bf16", how), Fabric.of(home)
    errors = []
    for row in json.loads((ROOT / "benchmarks/results/h200_blocks.json").read_text())["rows"]:
        cut = Slice(row["samples"], row["tokens"])
        block = [layer for layer in Model.preset(row["model"]).layers if layer.block == "block.0"]
        times = [layer_time(layer, cut, chip, fabric, how, Placement()) for layer in block]
        errors.append(sum(float(t.forward + t.backward) for t in times) / row["measured"][1] - 1)
    assert len(errors) == 25
    assert np.abs(errors).mean() < 0.06
    assert np.abs(errors).max() < 0.12
