"""Operators on the device, against what TraceLens publishes of the same traces."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.traces.rank.operators.operators import Operators

FOLDER = Path(__file__).parents[1] / "data" / "traces" / "tracelens"
PUBLISHED: dict[str, Any] = json.loads((FOLDER / "published.json").read_text())
TRACES = [name for name in PUBLISHED if name not in ("source", "columns")]
# TraceLens adds up times since the boot as doubles of microseconds, whose last digits are lost: 1/4096 of a microsecond.
US = 1 / 2048


@cache
def operators(name: str) -> Operators:
    return meshwright.analyze(FOLDER / f"{name}.json.gz", cache=False).ranks[0].costs


@pytest.mark.parametrize("name", TRACES)
def test_kernels_belong_to_the_same_operators(name: str) -> None:
    """All of them: nothing that launched a kernel is missing on either side."""
    found = {row.name: row for row in operators(name).table if row.device_alone}
    published = PUBLISHED[name]["operators"]
    assert found.keys() == published.keys()
    for operator, (microseconds, launching) in published.items():
        row = found[operator]
        assert row.device_alone / 1e3 == pytest.approx(microseconds, rel=1e-6, abs=US * launching)
        assert row.host.count >= launching  # ours counts calls that launched nothing, too


@pytest.mark.parametrize("name", TRACES)
def test_products_cost_the_same(name: str) -> None:
    found = {(row.name, row.dims): row for row in operators(name).shaped}
    for operator, dims, count, microseconds, gflops, mib, bias in PUBLISHED[name]["products"]:
        row = found[operator, json.dumps(dims, separators=(",", ":"))]
        rows, columns = (dims[1][0], dims[2][1]) if bias else (0, 0)
        assert row.count == count
        assert row.time / 1e3 == pytest.approx(microseconds, rel=1e-6, abs=US * count)
        assert row.cost.flops + rows * columns == pytest.approx(gflops * 1e9, rel=1e-12)
        assert row.cost.bytes == mib * 2**20
