"""Abilities of other frameworks, as limits of the search: `plan --for megatron` finds the best plan among those.

A framework's limits often depend on each other (DeepSpeed's pipeline takes ZeRO-1 only); limits of the search do not.
The rarer of the two is then left out, so that the framework can run every plan found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import InputError, UnknownName
from meshwright.search.space.limits import Limits

# Only our framework takes these: chosen operators, strategies that change inside a stage or between stages, cuts inside
# a block, axes in any order, swaps between devices, fractions of offload.
_OURS = ("adaptive", "mixed", "stagewise", "split", "placement", "swap", "partial", "compression")


@dataclass(frozen=True)
class Target:
    """Framework that a plan may be exported to."""

    name: str
    runtime: str  # whose times are predicted
    forbidden: tuple[str, ...]
    why: str  # in a line, the source of the limits


TARGETS = {
    target.name: target
    for target in (
        Target("meshwright", "meshwright", (), "everything a plan can say"),
        Target(
            "megatron",
            "megatron-overlap",
            (*_OURS, "zero2", "zero3", "selective", "offload", "gpipe", "zero-bubble", "zbv", "dualpipev"),
            "distributed optimizer (ZeRO-1, whole or in instances), 1F1B and interleaved, no or full recomputation (no "
            "module of its selective one repeats the activation of a dense layer alone); context parallelism as a ring "
            "(p2p) or as Ulysses (a2a). Its FSDP does not go with pipelines and is left out",
        ),
        Target(
            "mindspeed",
            "megatron-overlap",
            (*_OURS, "zero2", "zero3", "hybrid", "offload", "gpipe", "zero-bubble", "zbv", "dualpipev"),
            "as Megatron, on Ascend: ZeRO-1 over all replicas, norms and activation functions are repeated by switches of "
            "their own; its DualPipeV takes experts and no context parallelism, and is left out",
        ),
        Target(
            "torchtitan",
            "torchtitan",
            (*_OURS, "zero1", "ulysses", "offload", "zero-bubble"),
            "FSDP2 that keeps (ZeRO-2) or drops (ZeRO-3) gathered weights, over all replicas or in groups; ring context "
            "parallelism; GPipe, 1F1B, interleaved, ZB-V and DualPipeV",
        ),
        Target(
            "deepspeed",
            "deepspeed",
            (*_OURS, "tp", "sp", "ring", "pp", "hybrid", "park"),
            "ZeRO 1-3, states on the host, Ulysses, experts; its pipeline takes ZeRO-1 only and is left out",
        ),
        Target(
            "fsdp",
            "fsdp",
            (*_OURS, "tp", "sp", "ring", "ulysses", "ep", "pp", "zero1", "offload"),
            "no_shard, shard_grad_op (ZeRO-2), full_shard (ZeRO-3) or hybrid_shard over all devices, nothing else",
        ),
    )
}


def target(name: str) -> Target:
    """Return a target by name.

    >>> target("megatron").runtime
    'megatron-overlap'
    """
    try:
        return TARGETS[name]
    except KeyError:
        raise UnknownName("target", name, TARGETS, see=", ".join(TARGETS)) from None


def limits_for(name: str, fixed: Mapping[str, Any], forbidden: Iterable[str]) -> Limits:
    """Return the user's limits joined with the target's; the target must be able to run all fixed values.

    >>> "zero3" in limits_for("megatron", {"tp": 8}, ["ulysses"]).forbidden
    True
    """
    theirs = target(name).forbidden
    for what, value in fixed.items():
        names = {f"{what}{value}", str(value)} | ({what} if value not in (0, 1, "none", "false", False) else set())
        if clash := sorted(names & set(theirs)):
            raise InputError(
                f"{name} cannot run {clash[0]}", field=f"fix {what}", valid=f"another {what}, or no target"
            )
    return Limits.of(fixed, {*theirs, *forbidden})
