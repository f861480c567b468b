"""Kernels: against times measured on an H200 (benchmarks/results/h200.json) and one published for a B200."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshwright.clusters import device
from meshwright.cost.constants import DEFAULT
from meshwright.cost.layers.operators import Chip, attention_seconds, memory_seconds, peak_flops, product_seconds
from meshwright.cost.runtime import runtime
from tests.conftest import ROOT

MEASURED: dict[str, Any] = json.loads((ROOT / "benchmarks/results/h200.json").read_text())
NEMO = runtime("nemo")


def chip(precision: str = "bf16", name: str = "h200") -> Chip:
    return Chip.of(device(name), precision, NEMO)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_products_against_the_h200(precision: str) -> None:
    """Large products within a tenth on average, all within a third: power, clocks and tiles move single ones."""
    rows = [row for row in MEASURED["products"] if precision in row]
    large = [row for row in rows if row["m"] * row["k"] * row["n"] > 2e10]
    assert len(large) > 50
    ratio = np.array([float(product_seconds(chip(precision), r["m"], r["k"], r["n"])) / r[precision] for r in large])
    assert abs(np.log(ratio)).mean() < 0.10
    assert abs(np.log(ratio)).max() < 0.40


def test_attention_against_the_h200() -> None:
    ratios = []
    for row in MEASURED["attention"]:
        flops = 4 * row["batch"] * row["heads"] * row["head_dim"] * row["seq"] ** 2 / 2
        rows = row["batch"] * row["heads"] * row["seq"]
        for name, backward in (("forward", False), ("backward", True)):
            found = attention_seconds(chip(), flops, row["seq"], rows, row["head_dim"], backward=backward)
            ratios.append(float(found) / row[name])
    assert abs(np.log(ratios)).mean() < 0.12
    assert abs(np.log(ratios)).max() < 0.40


def test_memory_bound_kernels_against_the_h200() -> None:
    """Half of the kernels reach more than the constant, half less; none is off by more than twice."""
    ratios = []
    for row in MEASURED["memory_bound"]:
        norm = "norm" in row["op"]
        ratios.append(float(memory_seconds(chip(), row["forward_bytes"], norm=norm)) / row["forward"])
    assert abs(np.log(ratios)).max() < np.log(2)


# SimuMax v1.2, configs/system/b200_bf16_ceperm.json: experts, rows of each, n, k, forward part of the peak of 2250 TFLOP/s.
B200_EXPERTS = [
    (256, 128, 4096, 7168, 0.208), (128, 256, 4096, 7168, 0.271), (64, 512, 4096, 7168, 0.367),
    (32, 1024, 4096, 7168, 0.457), (160, 154, 3072, 5120, 0.200), (40, 616, 3072, 5120, 0.462),
]  # fmt: skip


@pytest.mark.parametrize(("experts", "rows", "n", "k", "part"), B200_EXPERTS)
def test_grouped_products_against_a_b200(experts: int, rows: int, n: int, k: int, part: float) -> None:
    """Few rows per expert: loading the weights takes as long as using them."""
    measured = 2 * experts * rows * n * k / (part * 2250e12)
    found = product_seconds(chip(name="b200"), rows, k, n, groups=experts)
    assert found == pytest.approx(measured, rel=0.30)


def test_more_power_sustains_more() -> None:
    weak, strong = chip(name="h100-500w"), chip(name="h100")
    assert weak.products.rate / strong.products.rate == pytest.approx((500 / 700) ** DEFAULT.power, rel=1e-6)


def test_narrow_products_lose() -> None:
    """Tensor parallelism 64 leaves an inner dimension of 128: more than a quarter of the rate is gone."""
    wide = product_seconds(chip(), 8192, 8192, 8192) / 64
    narrow = product_seconds(chip(), 8192, 128, 8192)
    assert narrow > 1.25 * wide


def test_a_launch_is_never_free() -> None:
    assert product_seconds(chip(), 16, 16, 16) > 3e-6
    assert memory_seconds(chip(), 16) > 1e-6


def test_unfit_precisions_fall_back() -> None:
    assert Chip.of(device("a100"), "fp8", NEMO).products.rate == Chip.of(device("a100"), "bf16", NEMO).products.rate
    assert peak_flops(device("a100"), "fp8") == 312e12
    assert peak_flops(device("cpu"), "bf16") > 0


def test_an_unknown_architecture_gets_what_is_usual() -> None:
    odd = replace(device("h100"), architecture="nobody-knows", watts=0.0)
    assert Chip.of(odd, "bf16", NEMO).products.rate == pytest.approx(989.4e12 * DEFAULT.architectures[""].products[0])
