"""Plans that are shown to every real framework: each kind of cut, alone and together."""

from __future__ import annotations

from typing import Any

from meshwright.plans import Job, Plan

DENSE: dict[str, Any] = {"model": "llama3-8b", "cluster": "2x8xh100", "global_batch": 128, "seq_len": 8192}
EXPERTS: dict[str, Any] = {"model": "qwen3-30b-a3b", "cluster": "2x8xh100", "global_batch": 64, "seq_len": 4096}
PLANS: dict[str, dict[str, Any]] = {
    "replicas": DENSE | {"zero": 0},
    "zero1": DENSE | {"zero": 1, "micro_batch": 2},
    "zero2": DENSE | {"zero": 2, "recompute": "selective"},
    "zero3": DENSE | {"zero": 3, "recompute": "full"},
    "hybrid": DENSE | {"zero": 3, "zero_group": 8},
    "tensor": DENSE | {"tp": 8, "zero": 2},
    "tensor-past-heads": DENSE | {"tp": 16},
    "tensor-fp8": DENSE | {"tp": 4, "zero": 3, "precision": "fp8"},
    "ulysses": DENSE | {"ulysses": 4, "zero": 3},
    "ring": DENSE | {"ring": 4, "zero": 3, "zero_group": 8},
    "tensor-ulysses": DENSE | {"tp": 2, "ulysses": 4},
    "pipeline": DENSE | {"tp": 4, "pp": 2, "recompute": "full"},
    "gpipe": DENSE | {"pp": 4, "zero": 2, "schedule": "gpipe"},
    "interleaved": DENSE | {"tp": 2, "pp": 4, "virtual": 2, "zero": 2, "micro_batch": 2},
    "zero-bubble": DENSE | {"tp": 2, "pp": 4, "schedule": "zero-bubble"},
    "zero-bubble-interleaved": DENSE | {"tp": 2, "pp": 4, "schedule": "zero-bubble", "virtual": 2},
    "zbv": DENSE | {"tp": 2, "pp": 4, "schedule": "zbv", "zero": 2},
    "dualpipev": DENSE | {"tp": 2, "pp": 4, "schedule": "dualpipev", "zero": 2},
    "uneven": DENSE
    | {"tp": 4, "stages": [{"layers": "embed..block.13"}, {"layers": "block.14..head"}], "micro_batches": 16},
    "offload": DENSE | {"zero": 3, "offload": {"optimizer": 1.0, "parameters": 1.0}},
    "experts": EXPERTS | {"ep": 8, "zero": 2},
    "experts-folded": EXPERTS | {"tp": 4, "ep": 8, "zero": 2},
    "experts-pipeline": EXPERTS | {"pp": 2, "tp": 2, "ep": 4, "etp": 2},
    "small": {"model": "tiny-llama", "cluster": "4xh100", "global_batch": 16, "tp": 2, "zero": 3},
    "tied": {"model": "llama3.2-1b", "cluster": "8xh100", "global_batch": 32, "pp": 2, "tp": 2, "zero": 2},
    "fp32": DENSE | {"zero": 2, "precision": "fp32"},
    "states16": DENSE | {"zero": 2, "optimizer": "adamw-16bit"},
    "muon": DENSE | {"zero": 2, "optimizer": "muon"},
    "async": DENSE | {"tp": 8, "zero": 2, "overlap": {"tensor_chunks": 8}},
}


def made(name: str) -> tuple[Job, Plan]:
    plan = Plan.of(PLANS[name])
    return plan.resolve(), plan
