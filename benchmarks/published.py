"""Rows of published measurements -> job, plan and runtime that our cost model can price.

A table has one run per row, in the columns of `benchmarks/data/public.csv`. A cell that a source leaves out gets the
documented default of the framework the source used; nothing here looks at the measured time.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from described import Cells, Refused, cluster_of, model_of, number, whole

import meshwright as mw
from meshwright.cost.memory.device_memory import plan_memory
from meshwright.cost.runtime import Runtime, runtime


@dataclass(frozen=True)
class Run:
    """One published run, as the cost model sees it."""

    row: Cells
    job: mw.Job
    plan: mw.Plan
    runtime: Runtime
    seconds: float | None  # measured step time
    peak_bytes: float | None  # measured peak memory
    reserved: bool  # whether that peak is what the allocator reserved or what tensors took

    @property
    def group(self) -> str:
        if flagged(self.row):
            return "flagged"
        if self.row["gpu"].startswith("V100"):
            return "v100"
        low = re.search(r"fp8|fp4", self.row["precision"].lower())
        return "moe-or-low-precision" if low or number(self.row, "moe_experts") else "dense-16bit"


class BadTable(Exception):
    """Why a file is no table of published runs."""


COLUMNS = (
    "row_id", "source_id", "source", "model", "layers", "hidden", "heads", "ffn", "seq_len", "global_batch", "gpu", "n_gpus",
    "interconnect", "precision", "tp", "pp", "cp", "zero_stage_or_fsdp_mode", "recompute", "sequence_parallel", "notes",
    "step_time_std_s", "complete",
)  # fmt: skip


@dataclass
class Table:
    """The rows of a file: those that can be priced, and why the others cannot."""

    runs: list[Run] = field(default_factory=list)
    refused: list[dict[str, str]] = field(default_factory=list)


def read_table(path: str | Path) -> Table:
    """Every row of a table of published runs."""
    table = Table()
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise BadTable(f"has no column {', '.join(missing)}; needed are {', '.join(COLUMNS)}")
        for i, row in enumerate(reader):
            try:
                table.runs.append(convert(row))
            except (Refused, mw.MeshwrightError) as why:
                table.refused.append({"row_id": row.get("row_id") or str(i), "why": str(why)})
    return table


def flagged(row: Cells) -> bool:
    return "CHECK" in row["notes"] or "INCONSISTENT" in row["notes"]


def convert(row: Cells) -> Run:
    """Job, plan and runtime of one row, or `Refused`."""
    if row["complete"] != "y":
        raise Refused("the source leaves out what a plan needs (complete is not y)")
    for name in ("layers", "hidden", "heads", "ffn", "seq_len", "global_batch", "n_gpus"):
        if not number(row, name):
            raise Refused(f"{name} is missing")
    seconds, memory = number(row, "step_time_std_s"), number(row, "peak_mem_gb")
    if not seconds and not memory and "OOM" not in row["notes"]:
        raise Refused("neither step time nor peak memory is published")
    framework = framework_of(row)
    job = mw.Job(
        model_of(row), cluster_of(row), whole(row, "global_batch"), whole(row, "seq_len"), precision_of(row),
        optimizer_of(row),
    )  # fmt: skip
    short = plan_of(row, framework, job)
    plan = mw.Plan.of(short, job)
    if not row["recompute"].strip():
        plan = least_recompute(short, job, framework)
    unit = 2**30 if "gib" in row["notes"].lower() else 1e9
    return Run(
        row, job, plan, framework, seconds or None, memory * unit or None, "allocated" not in row["notes"].lower()
    )


def precision_of(row: Cells) -> str:
    text = row["precision"].lower()
    for pattern, found in (
        ("nvfp4|fp4", "nvfp4"), ("mxfp8", "mxfp8"), ("fp8|float8", "fp8"), ("bf16|bfloat16", "bf16"),
        ("fp16|float16|half", "fp16"), ("tf32", "tf32"), ("fp32|float32", "fp32"),
    ):  # fmt: skip
        if re.search(pattern, text):
            return found
    raise Refused(f"precision '{row['precision']}' is not known")


def optimizer_of(row: Cells) -> str:
    """Megatron-Bridge's recipes of DeepSeek-like mixtures keep their moments in 16 bits, AutoModel's all of them."""
    if "automodel" in row["source"].lower():
        return "adamw-16bit"
    mixture = re.search("deepseek|moonlight|kimi", row["model"].lower())
    return "adamw-16bit" if mixture and "megatron-bridge" in row["source"].lower() else "adamw"


# ------------------------------------------------------------------ what ran it


def framework_of(row: Cells) -> Runtime:
    """The framework behind a source, from what the row says about it."""
    text = f"{row['source']} {row['source_id']} {row['notes']}".lower()
    if "torchtitan" in text:
        compiled = "compile" in text or "async" in text
        recent = "2024" not in text and "2412" not in text
        found = runtime(("torchtitan" if recent else "torchtitan-2024") if compiled else "torchtitan-eager")
        return replace(found, tp_overlap=0.7) if re.search(r"async[ -]?tp", row["notes"].lower()) else found
    if row["gpu"].startswith("V100") or "bigscience" in text:
        return runtime("deepspeed-2022" if row["zero_stage_or_fsdp_mode"].startswith("3") else "megatron-2021")
    for words, name in (
        ("llm-foundry mosaic composer", "composer"),
        ("automodel", "automodel"),
        ("internevo", "internevo"),
        ("maxtext", "maxtext"),
        ("deepspeed", "deepspeed-2022" if "2022" in text else "deepspeed"),
        ("nemo megatron-bridge mlperf dgxc gpu-recipes", "nemo"),
    ):
        if any(word in text for word in words.split()):
            if name == "nemo" and not re.search(r"release 2[6-9]", row["notes"]):
                name = "nemo-2025"
            pure = "pure" in row["precision"]  # parameters, gradients and reductions in 16 bits
            return replace(runtime(name), gradient_bytes=2.0) if pure else runtime(name)
    if re.search(r"2022|2205\.05198", text):
        return runtime("megatron-2022")
    if re.search(r"sc'21|20(20|21)|2201\.11990", text):
        return runtime("megatron-2021")
    return runtime("fsdp" if "fsdp" in row["zero_stage_or_fsdp_mode"].lower() else "megatron")


# ------------------------------------------------------------------ how


def plan_of(row: Cells, framework: Runtime, job: mw.Job) -> dict[str, Any]:
    """The short form of a row's plan."""
    tp, pp, cp = (whole(row, axis, 1) or 1 for axis in ("tp", "pp", "cp"))
    devices = job.cluster.devices
    if devices % (tp * pp * cp):
        raise Refused(f"tp {tp} x pp {pp} x cp {cp} does not divide {devices} devices")
    dp = devices // (tp * pp * cp)
    micro = whole(row, "micro_batch", 1) or 1
    if pp > 1 and framework.name.startswith("torchtitan"):
        # torchtitan's column is the local batch, cut by default into as many micro-batches as there are stages.
        micro = max(job.global_batch // dp // pp, 1)
    if job.global_batch % dp:
        raise Refused(f"global batch {job.global_batch} does not divide over dp {dp}")
    per_replica = job.global_batch // dp
    micro = next(size for size in range(min(micro, per_replica), 0, -1) if per_replica % size == 0)
    # SimuMax states that its context parallelism is the all-to-all form.
    context = "ulysses" if "simumax" in row["source"].lower() else "ring"
    plan: dict[str, Any] = {
        "tp": tp, "pp": pp, context: cp, "dp": dp, "micro_batch": micro,
        "zero": zero_of(row, framework, dp * cp, pp), "recompute": recompute_of(row, framework, job),
    }  # fmt: skip
    if found := re.search(r"(?:shard group|shard=|FSDP=)\s*(\d+)", row["zero_stage_or_fsdp_mode"]):
        plan["zero_group"] = min(int(found[1]), dp * cp)
    old = framework.name in {"megatron-2021", "megatron-2022", "deepspeed-2022"}
    if row["sequence_parallel"] == "n" or (old and row["sequence_parallel"] != "y"):
        plan["sp"] = False
    if ep := whole(row, "ep"):
        plan |= {"ep": ep, "etp": whole(row, "etp", 1) or 1}
    elif whole(row, "moe_experts"):
        plan["ep"] = min(8, job.cluster.groups[0].devices_per_node)  # unstated: the experts of a layer over one node
    virtual = virtual_of(row, pp)
    if pp > 1 and virtual > 1:
        plan["virtual"] = virtual
    return plan


def zero_of(row: Cells, framework: Runtime, replicas: int, pp: int) -> int:
    text = row["zero_stage_or_fsdp_mode"].lower()
    if replicas == 1:
        return 0
    if "shard_grad_op" in text or "not resharded" in text or "zero-2" in text:
        return 2
    if "fsdp" in text or "zero-3" in text or text.startswith("3"):
        # In a pipeline, weights stay gathered and gradients whole until the last micro-batch: as in ZeRO-1.
        return 1 if pp > 1 and framework.name.startswith("torchtitan") else 3
    if text == "0":
        return 0
    if re.match(r"1|2", text):
        return int(text[0])
    return 1  # distributed optimizer: the default of Megatron-Core recipes, NeMo and InternEvo


def recompute_of(row: Cells, framework: Runtime, job: mw.Job) -> Any:
    text = row["recompute"].lower()
    if text in {"", "none", "n", "no", "off"}:
        return "none"
    if "full" in text:
        return "full"
    if not re.search("select|core|mlp|norm", text):
        raise Refused(f"recompute is '{text[:40]}', expected none, selective or full")
    names = {name for layer in job.model.layers for name in layer.op_names}
    if found := re.search(r"recompute detail: ([\w, ]+)", row["notes"]):
        parts = [part.strip() for part in found[1].split(",")]
        chosen = [name for part in parts for name in _RECOMPUTED.get(part, ())]
    elif framework.name.startswith("torchtitan"):
        # Its policy saves every second matrix product of a block and repeats the others, and what is cheap.
        chosen = ["norm", "activation", "proj", "up"]
    else:
        chosen = ["core"]  # Megatron's selective recomputation repeats the core of attention
    return [name for name in chosen if name in names] or "none"


_RECOMPUTED = {
    "core_attn": ("core",), "mlp": ("gate", "up", "activation", "down"), "layernorm": ("norm",),
    "mla_up_proj": ("q_up", "kv_up", "q"), "moe_act": ("expert_activation",), "shared_experts": (
        "shared_up", "shared_activation", "shared_down"),
    "moe": ("expert_up", "expert_activation", "expert_down", "dispatch", "combine"),
    "save_dot_with_context_except_mlp": ("norm", "gate", "up", "activation", "down"),
}  # fmt: skip


def least_recompute(short: dict[str, Any], job: mw.Job, framework: Runtime) -> mw.Plan:
    """A source that does not say what it recomputes ran the least that fits: it did run."""
    names = {name for layer in job.model.layers for name in layer.op_names}
    cheap = [name for name in ("norm", "activation", "expert_activation", "q_up", "kv_up") if name in names]
    some = [name for name in (*cheap, "gate", "up", "expert_up", "shared_gate", "shared_up") if name in names]
    for level in ("none", cheap, some, "full"):
        plan = mw.Plan.of(short | {"recompute": level}, job)
        if not any(row.short_by for row in plan_memory(plan, job, framework)):
            return plan
    return mw.Plan.of(short | {"recompute": "full"}, job)


def virtual_of(row: Cells, pp: int) -> int:
    """Stages per device group; Megatron's papers interleave wherever blocks divide, without printing how often."""
    blocks = whole(row, "layers")
    given = whole(row, "vpp")
    if given:
        return max(min(given, blocks // pp), 1)  # frameworks that count embedding and head as layers fit one more
    return 2 if "interleaved" in row["notes"] else 1
