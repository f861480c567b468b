"""Write a plan for Hetu-Galvatron: JSON with a strategy per block, and one for embedding and head.

Fields are as hetu-galvatron 2.4.0 reads them (galvatron/utils/config_utils.py, config2strategy;
core/runtime/hybrid_parallel_config.py). `cp_sizes_enc`, `vcp`, `ep_sizes_enc` and `tp_of_ep_sizes_enc` are newer
(galvatron/utils/config_utils.py of PKU-DAIR/Hetu-Galvatron at 1d27a7a, and its tests of 2026); 2.4.0 ignores them.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec.structs import replace

from meshwright.base.files import pretty_json
from meshwright.errors import InputError
from meshwright.frameworks.contract import Exported, Format, Inexpressible
from meshwright.frameworks.galvatron.read import DP_FIRST, READ, plan_of_layers, read
from meshwright.frameworks.shared.launch_command import torchrun
from meshwright.frameworks.shared.nearest_plan import Draft
from meshwright.models import Model
from meshwright.plans import Job, Plan
from meshwright.plans.spans import layer_range
from meshwright.plans.strategy import DEFAULT_ORDER, Offload, Span, Strategy

_TO_FILL = ("train_dist.py: that of the model's folder in Galvatron, with its data arguments and the sequence length",)


def write(job: Job, plan: Plan) -> Exported:
    """Return a plan as Galvatron's strategy file."""
    draft = Draft.of(job, plan)
    by_layer_here = ("spans:", "order:", "recompute:", "offload:")  # expressed per layer, not for the whole
    draft.missing = [line for line in draft.missing if not line.startswith(by_layer_here)]
    draft.only_schedules("gpipe", "1f1b")
    draft.no_overlap_choices()
    draft.only_precision("bf16", "fp16", "fp32")
    draft.only_optimizer("adamw")
    by_layer = _narrowed(_by_layer(job.model, plan), draft.missing)
    strategies = _blocks(job.model, by_layer, draft.missing)
    ends = _ends(job.model, by_layer, strategies, draft.missing)
    table = _table(draft, strategies, ends)
    sequence = any(strategy.sp for strategy in [*strategies, ends])
    words = ["train_dist.py --galvatron_config_path strategy.json --mixed_precision", draft.job.precision]
    command = " ".join([torchrun(job, plan), *words, *(["--sequence-parallel"] if sequence else [])])
    files = {"strategy.json": pretty_json(table, 60)}
    meant = _meant(draft.job, table, plan.devices, sequence)
    return Exported(files, command, meant, tuple(draft.missing), _TO_FILL)


def _meant(job: Job, table: dict[str, Any], devices: int, sequence: bool) -> Plan:
    try:
        return plan_of_layers(job, table, devices, sequence)
    except InputError as error:
        raise Inexpressible(f"the nearest plan that can be said breaks a rule: {error}") from None


def _by_layer(model: Model, plan: Plan) -> list[Strategy]:
    """Return the strategy of every layer."""
    found: dict[int, Span] = {}
    for stage in plan.pipelines[0].stages:
        for span in stage.spans:
            found |= dict.fromkeys(layer_range(model, span.layers), span)
    names = Strategy.__struct_fields__
    return [Strategy(**{name: getattr(found[i], name) for name in names}) for i in range(len(model.layers))]


def _blocks(model: Model, by_layer: list[Strategy], lines: list[str]) -> list[Strategy]:
    """Return one strategy for both halves of a block: the cut of the first, recompute if either has it."""
    found, differ = [], []
    for block in model.blocks:
        own = [by_layer[i] for i, layer in enumerate(model.layers) if layer.block == block]
        if any(strategy != own[0] for strategy in own):
            differ.append(block)
        again = any(strategy.recompute == "full" for strategy in own)
        found.append(replace(own[0], recompute="full" if again else "none"))
    if differ:
        others = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
        lines.append(f"halves of {differ[0]}{others} differ: both are cut as the first, and repeated where either is")
    return found


def _ends(model: Model, by_layer: list[Strategy], blocks: list[Strategy], lines: list[str]) -> Strategy:
    """Return one strategy for the embedding and the head: that of the head, which works more.

    Neither recomputes anything nor has experts; a plan gives them the values of the block beside them.
    """
    outside = [i for i, layer in enumerate(model.layers) if not layer.block]
    own = [by_layer[i] for i in outside] or [by_layer[-1]]
    beside = [blocks[0] if i < len(model.layers) // 2 else blocks[-1] for i in outside] or [blocks[-1]]
    cut = [replace(one, recompute="none", ep=1, etp=1) for one in own]
    if any(strategy != cut[-1] for strategy in cut):
        lines.append("embedding and head differ; both are cut as the head")
    if any((a.recompute, a.ep, a.etp) != (b.recompute, b.ep, b.etp) for a, b in zip(own, beside, strict=True)):
        lines.append("embedding and head: recompute and experts as the blocks beside them")
    return cut[-1]


def _narrowed(strategies: list[Strategy], lines: list[str]) -> list[Strategy]:
    """Return strategies with replacements for what Galvatron cannot express; each kind is reported once."""
    said: dict[str, str] = {}
    low = {s.zero for s in strategies if s.zero != 3}
    default: Literal[0, 2] = 2 if low & {1, 2} else 0
    if low - {default}:
        levels = "/".join(map(str, sorted(low)))
        said["zero"] = f"zero={levels}: one level for all that are not ZeRO-3; ZeRO-{default} instead"
    sequence = any(s.sp for s in strategies)
    known = [_one(s, default, sequence, said) for s in strategies]
    lines += said.values()
    return known


def _one(strategy: Strategy, default: Literal[0, 2], sequence: bool, said: dict[str, str]) -> Strategy:
    s = strategy
    if s.tp > 1 and s.ulysses > 1:
        said["both"] = "tp and ulysses: a layer has one of the two; tensor parallelism takes the devices of both"
        s = replace(s, tp=s.tp * s.ulysses, ulysses=1)
    if s.zero_group:
        said["group"] = "zero_group: shards over all replicas"
    if s.offload != Offload():
        said["offload"] = "offload: everything stays on the device"
    if s.recompute not in ("none", "full"):
        said["recompute"] = "recompute: a block is repeated whole or not at all; whole where anything is"
    if s.order not in (DEFAULT_ORDER, DP_FIRST):
        said["order"] = "order: tensor parallelism over adjacent devices"
    if sequence and s.tp > 1 and not s.sp:
        said["sp"] = "sp: one choice for all layers; on"
    return Strategy(
        dp=s.dp, tp=s.tp, ulysses=s.ulysses, ring=s.ring, ep=s.ep, etp=s.etp,
        sp=sequence and s.tp > 1,
        zero=3 if s.zero == 3 else default,
        recompute="none" if s.recompute == "none" else "full",
        order=DP_FIRST if s.order == DP_FIRST and s.tp > 1 else DEFAULT_ORDER,
    )  # fmt: skip


def _table(draft: Draft, strategies: list[Strategy], ends: Strategy) -> dict[str, Any]:
    def row(values: list[int]) -> str:
        return ",".join(map(str, values))

    plain = {s.zero for s in [*strategies, ends]} - {3}
    table: dict[str, Any] = {
        "pp_deg": draft.uniform.groups,
        "tp_sizes_enc": row([s.tp * s.ulysses for s in strategies]),
        "tp_consecutive_flags": row([int(s.order != DP_FIRST) for s in strategies]),
        "cp_sizes_enc": row([s.ring for s in strategies]),
        "dp_types_enc": row([int(s.zero == 3) for s in strategies]),
        "use_sp": row([int(s.ulysses > 1) for s in strategies]),
        "checkpoint": row([int(s.recompute == "full") for s in strategies]),
        "global_bsz": draft.job.global_batch,
        "chunks": draft.uniform.micro_batches,
        "pp_division": row(list(draft.uniform.blocks)),
        "pipeline_type": "gpipe" if draft.uniform.schedule.name == "gpipe" else "pipedream_flush",
        "default_dp_type": "zero2" if 2 in plain else "ddp" if 0 in plain else "zero3",
        "vtp": ends.tp * ends.ulysses,
        "vsp": int(ends.ulysses > 1),
        "vcp": ends.ring,
        "embed_sdp": int(ends.zero == 3),
    }
    if any(s.ep > 1 or s.etp > 1 for s in strategies):
        table["ep_sizes_enc"] = row([s.ep for s in strategies])
        table["tp_of_ep_sizes_enc"] = row([s.etp for s in strategies])
    return table


FORMAT = Format("galvatron", "Hetu-Galvatron", "", write, read, frozenset(READ))
