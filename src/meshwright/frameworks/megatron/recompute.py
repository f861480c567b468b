"""Translate recompute between operators of a plan and modules of Megatron.

Modules are those of megatron-core 0.16.1 (`TransformerConfig.recompute_modules`), with the operators that each
recomputes. Our `selective` (norms and activation functions) has no counterpart for dense layers, where no module
recomputes the activation alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.frameworks.megatron.arguments import Arguments, Given
from meshwright.models import Model
from meshwright.models.layer import Recompute

_SHARED = frozenset({"shared_router", "shared_gate", "shared_up", "shared_activation", "shared_down", "shared_scale"})
MODULES: dict[str, frozenset[str]] = {
    "core_attn": frozenset({"core"}),
    "layernorm": frozenset({"norm"}),
    "mla_up_proj": frozenset({"q_up", "kv_up"}),
    "mlp": frozenset({"gate", "up", "activation", "down"}),
    "moe": frozenset({"router", "dispatch", "expert_up", "expert_activation", "expert_down", "combine"}) | _SHARED,
    "moe_act": frozenset({"expert_activation"}),
    "shared_experts": _SHARED,
}


@dataclass(frozen=True)
class Repeated:
    """Recompute choice of all layers, and the number of blocks per stage that use it; None: all."""

    what: Recompute
    blocks: int | None = None


def recompute_arguments(model: Model, repeated: Repeated, missing: list[str]) -> tuple[Arguments, Repeated]:
    """Return the nearest arguments in Megatron, and their meaning."""
    if repeated.what == "none":
        return {}, repeated
    if repeated.what == "full":
        method = ("uniform", "1") if repeated.blocks is None else ("block", str(repeated.blocks))
        return {
            "recompute-granularity": ("full",),
            "recompute-method": (method[0],),
            "recompute-num-layers": (method[1],),
        }, repeated
    wanted = operators_of(model, repeated.what)
    modules = _modules_within(model, wanted)
    covered = operators_in(model, modules)
    if left := sorted(wanted - covered):
        instead = "+".join(sorted(covered)) or "nothing"
        missing.append(f"recompute: no module of Megatron repeats {'+'.join(left)} alone; {instead} is repeated")
    if not modules:
        return {}, Repeated("none")
    said = {"recompute-granularity": ("selective",), "recompute-modules": modules}
    same = not left and isinstance(repeated.what, tuple) and set(repeated.what) == covered
    return said, repeated if same else Repeated(tuple(sorted(covered)))


def operators_of(model: Model, what: Recompute) -> frozenset[str]:
    """Return the operators that some block recomputes; Megatron does not recompute the ends of the model."""
    blocks = [layer for layer in model.layers if layer.block]
    return frozenset(name for layer in blocks for name in layer.recomputed_ops(what))


def operators_in(model: Model, modules: tuple[str, ...]) -> frozenset[str]:
    there = frozenset(name for layer in model.layers if layer.block for name in layer.op_names)
    return frozenset(name for module in modules for name in MODULES[module]) & there


def _modules_within(model: Model, wanted: frozenset[str]) -> tuple[str, ...]:
    """Return the modules that recompute nothing else, without those whose operators another one already covers."""
    found: list[str] = []
    for module in sorted(MODULES, key=lambda name: -len(operators_in(model, (name,)))):
        mine = operators_in(model, (module,))
        if mine and mine <= wanted and not mine <= operators_in(model, tuple(found)):
            found.append(module)
    return tuple(sorted(found))


def recompute_of(given: Given, model: Model, assumed: list[str]) -> Repeated:
    """Return the recompute choice of a script."""
    granularity = given.choice("recompute-granularity", "", ("full", "selective"))
    if given.on("recompute-activations"):
        if granularity == "full":
            raise given.refused("recompute-activations", "means selective, but --recompute-granularity is full")
        granularity = "selective"
    if given.on("moe-layer-recompute") and granularity != "full":
        return Repeated(tuple(sorted(operators_in(model, ("moe",)))))
    if granularity == "full":
        return _full(given, assumed)
    if not granularity:
        return Repeated("none")
    modules = given.words("recompute-modules") or ("core_attn",)
    for module in modules:
        if module not in MODULES:
            raise given.refused("recompute-modules", f"names '{module}'", ", ".join(MODULES))
    names = tuple(sorted(operators_in(model, modules)))
    return Repeated(names or "none")


def _full(given: Given, assumed: list[str]) -> Repeated:
    method = given.choice("recompute-method", "", ("uniform", "block"))
    count = given.integer("recompute-num-layers", 0)
    if not method or not count:
        absent = "recompute-num-layers" if method else "recompute-method"
        raise given.refused("recompute-granularity", f"is full, but --{absent} is not there", f"--{absent} beside it")
    if method == "block":
        return Repeated("full", count)
    if count > 1:
        assumed.append(f"recompute: units of {count} blocks keep one input each; taken: every block keeps its own")
    return Repeated("full")
