"""Rows of published measurements -> job, plan and runtime that our cost model can price.

A table has one run per row, in the columns of `benchmarks/data/public.csv`. A cell that a source leaves out gets the
documented default of the framework the source used; nothing here looks at the measured time.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

import meshwright as mw
from meshwright.cost.memory import plan_memory
from meshwright.cost.runtime import Runtime, runtime

Cells = dict[str, str]


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


class Refused(Exception):
    """Why a row cannot be priced."""


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


def number(row: Cells, name: str, default: float = 0.0) -> float:
    """A cell as a number, or the default where it is blank."""
    text = (row.get(name) or "").strip()
    if text.lower() in {"", "-", "nan", "none", "n/a"}:
        return default
    try:
        value = float(text)
    except ValueError:
        raise Refused(f"{name} is '{text[:40]}', expected a number") from None
    if not isfinite(value) or value < 0:
        raise Refused(f"{name} is {text[:40]}, expected 0 or more")
    return value


def whole(row: Cells, name: str, default: int = 0) -> int:
    return round(number(row, name, default))


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
    for found in ("nvfp4", "mxfp8", "fp8", "bf16", "fp16", "tf32", "fp32"):
        if found in text:
            return found
    raise Refused(f"precision '{row['precision']}' is not known")


def optimizer_of(row: Cells) -> str:
    """Megatron-Bridge's recipes of DeepSeek-like mixtures keep their moments in 16 bits."""
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
        ("deepspeed", "deepspeed-2022"),
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


# ------------------------------------------------------------------ what was trained


def model_of(row: Cells) -> mw.Model:
    """The architecture of a row; of the forms its numbers allow, the one with the stated parameter count."""
    shape = (
        row["model"], number(row, "params_b"), *(whole(row, name) for name in (
            "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "moe_experts", "moe_topk", "seq_len")),
    )  # fmt: skip
    dense = re.search(r"dense_layers=(\d+)", row["notes"])
    return _model(*shape, int(dense[1]) if dense else 0)


@lru_cache(maxsize=1024)
def _model(
    name: str, params_b: float, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, experts: int,
    top_k: int, seq_len: int, dense: int = 0,
) -> mw.Model:  # fmt: skip
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    base: dict[str, Any] = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads, "intermediate_size": ffn, "vocab_size": vocab or 51200,
    }  # fmt: skip
    if experts:
        return _mixture(plain, base, experts, top_k, name, dense)
    gpt = {
        "model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": ffn,
        "vocab_size": vocab or 51200, "n_positions": max(seq_len, 1024),
        **dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.1 if plain.startswith("gpt") else 0.0),
    }  # fmt: skip
    llama = base | {"model_type": "llama", "tie_word_embeddings": False}
    candidates = [gpt, llama, llama | {"tie_word_embeddings": True}]
    models = [mw.Model.from_config(config, name) for config in candidates]
    if params_b:
        return min(models, key=lambda model: abs(model.parameters / 1e9 - params_b))
    return models[0 if re.match(r"gpt|mpt|opt|bloom", plain) else 1]


def _mixture(plain: str, base: dict[str, Any], experts: int, top_k: int, name: str, dense: int) -> mw.Model:
    """Mixtures name their family; the table's ffn is the width of one routed expert."""
    width = base["intermediate_size"]
    if re.search("deepseek|kimi|moonlight", plain):
        small = "moonlight" in plain
        old = "v2" in plain
        config = base | {
            "model_type": "deepseek_v2" if old else "deepseek_v3", "n_routed_experts": experts,
            "num_experts_per_tok": top_k, "moe_intermediate_size": width,
            "intermediate_size": 11264 if small else (12288 if old else 18432),
            "n_shared_experts": 2 if small or old else 1, "first_k_dense_replace": min(
                dense if dense else (3 if "v3" in plain else 1), base["num_hidden_layers"] - 1),
            "q_lora_rank": None if small else 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128,
        }  # fmt: skip
        return mw.Model.from_config(config, name)
    config = base | {
        "model_type": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": top_k,
        "moe_intermediate_size": width, "head_dim": 64 if "oss" in plain else 128, "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }  # fmt: skip
    if "mixtral" in plain:
        config = base | {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": top_k}
    return mw.Model.from_config(config, name)


def gpt_model(layers: int, hidden: int, heads: int, seq_len: int, vocab: int = 51200) -> mw.Model:
    """A GPT as Megatron-LM's papers describe them."""
    return _model("GPT", 0.0, layers, hidden, heads, heads, 4 * hidden, vocab, 0, 0, seq_len)


# ------------------------------------------------------------------ on what

_DEVICES = (
    (r"a100-?40", "a100-40gb"), (r"a100", "a100-80gb"), (r"a800", "a800"), (r"v100-?16", "v100-16gb"),
    (r"v100", "v100-32gb"), (r"h100-96|500 ?w", "h100-500w"), (r"gb300", "gb300"), (r"gb200", "gb200"), (r"b300", "b300"),
    (r"b200", "b200"), (r"h200", "h200"), (r"h100", "h100"), (r"h800", "h800"), (r"h20\b", "h20"), (r"mi300", "mi300x"),
    (r"mi325", "mi325x"), (r"mi355", "mi355x"), (r"l40|l4\b", "l4"),
)  # fmt: skip


def cluster_of(row: Cells) -> mw.Cluster:
    text = row["gpu"].lower()
    name = next((name for pattern, name in _DEVICES if re.search(pattern, text)), "")
    if not name:
        raise Refused(f"the device '{row['gpu']}' is not in the catalogue")
    devices, each = whole(row, "n_gpus"), whole(row, "gpus_per_node", 8)
    if devices < 1 or each < 1:
        raise Refused(f"{devices} devices in nodes of {each}")
    if devices < each:
        nodes, each = 1, devices
    elif devices % each:
        raise Refused(f"{devices} devices do not fill nodes of {each}")
    else:
        nodes = devices // each
    return _cluster(name, nodes, each, network_gb_s(row["interconnect"], each))


def network_gb_s(text: str, devices_per_node: int) -> float:
    """Network bytes/s of one device, in GB/s, where the row prints the adapters of a node; else 0."""
    if found := re.search(r"(\d+)\s*x\s*(\d+)\s*gb/s", text.lower()):
        return int(found[1]) * int(found[2]) / 8 / devices_per_node
    if found := re.search(r"(\d+)\s*gbps/node", text.lower()):
        return int(found[1]) / 8 / devices_per_node
    if found := re.search(r"(\d+)\s*gb/s.*per gpu", text.lower()):
        return int(found[1]) / 8
    if "tcpxo" in text.lower():
        return 25.0  # a3-megagpu-8g: eight adapters of 200 Gb/s
    return 0.0


def usual_cluster(name: str, nodes: int, each: int) -> mw.Cluster:
    """Nodes of a catalogue device with the links they are sold with."""
    return _cluster(name, nodes, each, 0.0)


@lru_cache(maxsize=1024)
def _cluster(name: str, nodes: int, each: int, network: float) -> mw.Cluster:
    preset = mw.Cluster.preset(f"{nodes}x{each}x{name}")
    links = preset.groups[0].links
    as_sold = not network or abs(links[-1].bandwidth / 1e9 - network) < 0.5
    # Racks of 72 are used in powers of two: jobs take 64 devices of each.
    racks = any(link.span == 72 for link in links) and nodes * each > 64 and nodes * each % 72 != 0
    if as_sold and not racks:
        return preset
    tables = [
        {
            "kind": link.kind, "topology": link.topology, "bandwidth_gb_s": link.bandwidth / 1e9,
            "latency_us": link.latency * 1e6, "aggregate_gb_s": link.aggregate / 1e9,
            **({"span": 64 if racks and link.span == 72 else link.span} if link.span else {}),
        }
        for link in links
    ]  # fmt: skip
    if not as_sold:
        tables[-1] |= {"topology": "shared", "bandwidth_gb_s": network * each, "aggregate_gb_s": network * each}
    group = {"device": name, "nodes": nodes, "devices_per_node": each, "link": tables}
    return mw.Cluster.from_table({"name": preset.name, "group": [group]})


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
    if row["sequence_parallel"] == "n":
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
