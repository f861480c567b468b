"""What a row of a table of published runs trained, and on what."""

from __future__ import annotations

import re
from functools import lru_cache
from math import isfinite
from typing import Any

import meshwright as mw
from meshwright.clusters.catalogue import find_device
from meshwright.models.attention import Attention
from meshwright.models.embedding_and_head import embedding, final_norm, language_head
from meshwright.models.families.decoder import chain
from meshwright.models.feed_forward import Mlp
from meshwright.models.operators import Place

Cells = dict[str, str]


class Refused(Exception):
    """Why a row cannot be priced."""


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
    if (kv_heads or heads) < heads:
        models.append(_plain_decoder(name, layers, hidden, heads, kv_heads, ffn, vocab or 51200))
    if params_b:
        return min(models, key=lambda model: abs(model.parameters / 1e9 - params_b))
    return models[0 if re.match(r"gpt|mpt|opt|bloom", plain) else 1]


def _plain_decoder(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int
) -> mw.Model:  # fmt: skip
    """Grouped attention with a feed-forward layer that is not gated (Nemotron)."""
    attention = Attention(hidden, heads, kv_heads, hidden // heads, norm="layer", rotary=True)
    mlp = Mlp(hidden, ffn, gated=False, norm="layer")
    end = [final_norm(Place("norm"), hidden, "layer"), language_head(Place("head"), vocab, hidden)]
    chained = chain(
        embedding(Place("embed"), vocab, hidden), layers, lambda _: attention.layer, lambda _: mlp.layer, end
    )
    return mw.Model(name, "decoder", tuple(chained), 0)


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
    ("a100.*40.*pcie|a100.*pcie.*40", "a100-40gb-pcie"), ("a100.*pcie", "a100-80gb-pcie"), ("a100-?40", "a100-40gb"),
    ("a100", "a100-80gb"), ("a800", "a800"), ("v100-?16", "v100-16gb"), ("v100", "v100-32gb"),
    ("h100-96|500 ?w", "h100-500w"), ("h100.*pcie", "h100-pcie"), ("h100.*nvl", "h100-nvl"), ("gb300", "gb300"),
    ("gb200", "gb200"), ("b300", "b300"), ("b200", "b200"), ("h200", "h200"), ("h100", "h100"), ("h800", "h800"),
    (r"h20\b", "h20"), ("mi300", "mi300x"), ("mi325", "mi325x"), ("mi355", "mi355x"),
)  # fmt: skip


def cluster_of(row: Cells) -> mw.Cluster:
    text = row["gpu"].lower()
    name = next((name for pattern, name in _DEVICES if re.search(pattern, text)), "")
    if not name:
        try:
            name = find_device(row["gpu"])
        except mw.UnknownName:
            raise Refused(f"the device '{row['gpu'][:40]}' is not in the catalogue") from None
    devices, each = whole(row, "n_gpus"), whole(row, "gpus_per_node", 8)
    if devices < 1 or each < 1:
        raise Refused(f"{devices} devices in nodes of {each}")
    # A job that does not fill its nodes is spread over them evenly.
    each = next(size for size in range(min(each, devices), 0, -1) if devices % size == 0)
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
