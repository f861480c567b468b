"""Plans that Megatron can say, drawn at random: degrees, cuts, repeated blocks, states, for four sorts of model."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

import meshwright as mw

BLOCKS = 12
DEVICES = 64
_SHARED = {
    "hidden_size": 512, "num_hidden_layers": BLOCKS, "num_attention_heads": 16, "vocab_size": 1024,
    "max_position_embeddings": 4096, "intermediate_size": 1024, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SHARED, "num_key_value_heads": 8, "rope_theta": 500000.0},
    "gpt2": {
        "model_type": "gpt2", "n_embd": 512, "n_layer": BLOCKS, "n_head": 16, "n_inner": 2048, "n_positions": 4096,
        "vocab_size": 1000, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0, "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", **_SHARED, "num_key_value_heads": 8, "head_dim": 64, "moe_intermediate_size": 256,
        "num_experts": 16, "num_experts_per_tok": 4, "mlp_only_layers": [0, 5],
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", **_SHARED, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "moe_intermediate_size": 256, "n_routed_experts": 16,
        "n_shared_experts": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 2, "n_group": 4, "topk_group": 2,
    },
}  # fmt: skip
# What a module of Megatron repeats, by the names of our operators.
REPEATED = {
    "llama": [("norm",), ("core",), ("core", "norm"), ("activation", "down", "gate", "up")],
    "gpt2": [("norm",), ("core",), ("activation", "down", "up")],
    "qwen3_moe": [("expert_activation",), ("expert_activation", "norm"), ("core",)],
    "deepseek_v3": [("kv_up", "q_up"), ("expert_activation", "norm"), ("norm",)],
}


def model(name: str) -> mw.Model:
    return mw.Model.from_config(CONFIGS[name], name)


@st.composite
def cuts(draw: st.DrawFn, stages: int) -> list[int]:
    """Blocks of each stage: even, or any with one at least, and none at the ends at times."""
    if BLOCKS % stages == 0 and draw(st.booleans()):
        return [BLOCKS // stages] * stages
    least = [1] * stages
    if stages > 2:
        least[0], least[-1] = draw(st.integers(0, 1)), draw(st.integers(0, 1))
    counts = list(least)
    for _ in range(BLOCKS - sum(least)):
        counts[draw(st.integers(1 if stages > 1 and not least[0] else 0, stages - (1 if least[-1] else 2)))] += 1
    return counts


def layers(counts: list[int]) -> list[str]:
    """Names of the layers of each stage."""
    found, taken = [], 0
    for i, count in enumerate(counts):
        first = "embed" if i == 0 else "norm" if not count else f"block.{taken}"
        taken += count
        last = "head" if i == len(counts) - 1 else f"block.{taken - 1}" if count else first
        found.append(first if first == last else f"{first}..{last}")
    return found


@st.composite
def jobs_and_plans(draw: st.DrawFn) -> tuple[mw.Job, mw.Plan]:
    name = draw(st.sampled_from(sorted(CONFIGS)))
    mixture = name in {"qwen3_moe", "deepseek_v3"}
    pp = draw(st.sampled_from([1, 2, 4]))
    virtual = draw(st.sampled_from([1, 2, 3])) if pp > 1 else 1
    tp, ulysses, ring = (draw(st.sampled_from([1, 2, 4][:n])) for n in (3, 2, 2))
    dp = DEVICES // (pp * tp * ulysses * ring)
    optimizer = draw(st.sampled_from(["adamw", "adamw-16bit", "adamw-8bit", "sgd", "sgd-momentum", "muon"]))
    zero = draw(st.sampled_from([0, 1, 2, 3] if pp == 1 and optimizer != "muon" else [0, 1]))
    zero = max(zero, 1) if "bit" in optimizer else zero
    replicas = dp * ulysses * ring
    table: dict[str, Any] = {
        "tp": tp, "ulysses": ulysses, "ring": ring, "dp": dp, "zero": zero,
        "sp": tp > 1 and (mixture or draw(st.booleans())),
    }  # fmt: skip
    if zero and not mixture and draw(st.booleans()):
        table["zero_group"] = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n < replicas] or [0]))
    if mixture:
        fits = [(e, t) for e in (1, 2, 4, 8, 16) for t in (1, 2, 4) if (DEVICES // pp) % (e * t) == 0]
        table["ep"], table["etp"] = draw(st.sampled_from(fits))
    states = [0.0, 0.25, 1.0] if zero and optimizer.startswith("adamw") else [0.0]
    offload = {"optimizer": draw(st.sampled_from(states))}
    table["recompute"] = draw(st.sampled_from(["none", "full", *REPEATED[name]]))
    if pp == 1 and table["recompute"] == "none":
        offload["activations"] = draw(st.integers(0, BLOCKS - 1)) / BLOCKS
    size = draw(st.integers(1, 2))
    whole = [n for n in range(pp, 5 * pp) if n % (n // pp) == 0] if virtual > 1 else list(range(1, 10))
    count = draw(st.sampled_from(whole))
    stages = draw(cuts(pp * virtual))
    table |= {
        "micro_batches": count,
        "offload": offload,
        "virtual": virtual,
        "overlap": draw(overlaps(table, pp, virtual)),
    }
    table["stages"] = [{"layers": text} for text in layers(stages)]
    if pp > 1 and dp > 1 and draw(st.booleans()):
        for i, devices in enumerate(_inside(pp, tp * ulysses * ring, dp) * virtual):
            table["stages"][i]["devices"] = devices
    precision = draw(st.sampled_from(["fp32", "bf16", "fp8", "mxfp8", "nvfp4", "fp16"][: 5 if mixture else 6]))
    job = mw.Job(model(name), mw.Cluster.preset("8x8xb200"), count * size * dp, 4096, precision, optimizer)
    plan = mw.Plan.of(table, job)
    if table["recompute"] == "full" and max(stages) > 1 and draw(st.booleans()):
        plan = first_blocks(plan, stages, draw(st.integers(1, max(stages) - 1)))
    return job, plan


@st.composite
def overlaps(draw: st.DrawFn, table: dict[str, Any], pp: int, virtual: int) -> dict[str, Any]:
    gradients = draw(st.booleans())
    gathers = table["zero"] > 0
    return {
        "gradients": gradients,
        "parameters": (gradients and draw(st.booleans())) if gathers else True,
        "pipeline": draw(st.booleans()) if pp > 2 or (pp == 2 and virtual == 1) else True,
        "tensor_chunks": draw(st.sampled_from([1, table["tp"]])) if table["sp"] else 1,
    }


def _inside(pp: int, inner: int, dp: int) -> list[str]:
    """Devices of each group where a pipeline is whole inside a replica: tp, cp, pp, then dp."""
    rows = [[(d * pp + g) * inner for d in range(dp)] for g in range(pp)]
    return [",".join(f"{first}-{first + inner - 1}" if inner > 1 else str(first) for first in row) for row in rows]


def first_blocks(plan: mw.Plan, stages: list[int], count: int) -> mw.Plan:
    """The same plan, but what follows the first blocks of each stage repeats nothing."""
    table, taken = plan.to_table(), 0
    for i, (stage, blocks) in enumerate(zip(table["pipelines"][0]["stages"], stages, strict=True)):
        (span,) = stage["spans"]
        last = i == len(stages) - 1
        if blocks > count or (last and blocks == count):
            cut = taken + count
            start = "embed" if i == 0 else f"block.{taken}"
            first = f"{start}..block.{cut - 1}" if start != f"block.{cut - 1}" else start
            rest = f"block.{cut}" if blocks > count else "norm"
            end = "head" if last else f"block.{taken + blocks - 1}"
            second = rest if rest == end else f"{rest}..{end}"
            stage["spans"] = [span | {"layers": first}, span | {"layers": second, "recompute": "none"}]
        taken += blocks
    return mw.Plan.of(table)


@st.composite
def any_jobs_and_plans(draw: st.DrawFn) -> tuple[mw.Job, mw.Plan]:
    """Plans that other frameworks may have no words for."""
    name = draw(st.sampled_from(sorted(CONFIGS)))
    pp = draw(st.sampled_from([1, 2, 4]))
    schedule = (
        draw(st.sampled_from(["1f1b", "gpipe", "zero-bubble", "zbv", "dualpipev", "interleaved"])) if pp > 1 else "1f1b"
    )
    table: dict[str, Any] = {
        "tp": draw(st.sampled_from([1, 2, 4])),
        "ulysses": draw(st.sampled_from([1, 2, 4])),
        "pp": pp,
        "schedule": schedule,
        "zero": draw(st.integers(0, 3)),
        "recompute": draw(st.sampled_from(["none", "selective", "full", ("core", "proj"), ("norm", "qkv")])),
        "micro_batches": 8,
        "offload": {key: draw(st.sampled_from([0.0, 0.3, 1.0])) for key in ("optimizer", "activations", "parameters")},
        "overlap": {key: draw(st.booleans()) for key in ("gradients", "parameters", "pipeline")},
        "sp": False,
    }
    if name == "deepseek_v3" and not isinstance(table["recompute"], str):
        table["recompute"] = ("core", "q_down")
    if schedule == "interleaved":
        table["virtual"] = 3
    optimizer = draw(st.sampled_from(["adamw", "adamw-8bit", "sgd", "muon"]))
    job = mw.Job(model(name), mw.Cluster.preset("8x8xb200"), 512, 4096, "bf16", optimizer)
    return job, mw.Plan.of(table, job)
