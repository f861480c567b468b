"""Facts of traces that make no sense: whatever a file says, a rank has facts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from meshwright.traces.rank.facts import digest
from tests.traces.test_breakdown import trace_of

CATEGORIES = ["kernel", "cpu_op", "cuda_runtime", "python_function", "user_annotation", "gpu_memcpy", "fwdbwd", "ac2g",
              "cuda_sync", "cpu_instant_event", None, "Operator"]  # fmt: skip
NAMES = ["aten::mm", "nn.Module: A_1", "k", "aten::copy_", "cudaStreamSynchronize", "[memory]", "ProfilerStep#1",
         "x.py(3): f", "aten::_convolution", "nccl:all"]  # fmt: skip
KEYS = ["correlation", "External id", "Input Dims", "Input type", "Concrete Inputs", "Sequence number", "Fwd thread id",
        "Bytes", "Addr", "Total Allocated", "Device Type", "Device Id"]  # fmt: skip
VALUES = [None, -1, 0, 1, 2, 3, "a", "", [], [[]], {}, "7", 3.5, 10**30, [[1, 2], [3]], ["float"], ["float", "float"]]
DEVICES = [[], None, [{}], [{"name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": "x"}], [{"name": 3}]]


def made_up(seed: int) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [
        {
            "ph": chance.choice("XXXXifs"),
            "cat": chance.choice(CATEGORIES),
            "name": chance.choice(NAMES),
            "pid": chance.choice([0, 1, "a", None]),
            "tid": chance.choice([7, "7", 1, None]),
            "ts": chance.choice([0, 1, 2, 3, 5, 8, 1e6, -3, chance.random() * 10]),
            "dur": chance.choice([0, 1, 2, 5, -1, 1e6, chance.random() * 5]),
            "id": chance.choice([1, 2, None]),
            "args": {key: chance.choice(VALUES) for key in KEYS if chance.random() < 0.5},
        }
        for _ in range(chance.randrange(25))
    ]


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_any_trace_has_facts(first: int) -> None:
    for seed in range(first, first + 100):
        facts = digest(trace_of(made_up(seed), deviceProperties=DEVICES[seed % len(DEVICES)]))
        assert all(0 <= part.share <= 1 + 1e-9 for part in facts.modules.parts)
