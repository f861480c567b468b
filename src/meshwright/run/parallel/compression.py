"""Choice of compressed gradients: the rules of a plan, by layer, become choices of parameters.

All-reduces over replicas are compressed (data parallel, context parallel, experts'), once a step. Gradients that all ranks
of a tensor-parallel group hold are not: they are small, and must stay equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.compression.sync import Choice, Options, Synchroniser, register_sharded
from meshwright.models import Model
from meshwright.plans import Compression, Plan
from meshwright.plans.spans import layers_of
from meshwright.run.mesh.collectives import AxisGroup
from meshwright.run.mesh.mesh import SpanMesh
from meshwright.run.mesh.shards import Layout
from meshwright.run.models import Decoder
from meshwright.run.parallel.compression_rules import asked

Rules = Mapping[str, Compression]  # by the name of a layer
LIMIT = 600.0  # seconds that a wait for a peer may take, as all others in a run
OPTIONS = Options(mean=False, limit=LIMIT)  # losses are divided by all tokens: gradients add up


def rules_of(model: Model, plan: Plan) -> dict[str, Compression]:
    """The rule of every layer that has one; rules that ask for the same are one."""
    same: dict[tuple[Any, ...], Compression] = {}
    found: dict[str, Compression] = {}
    for rule in plan.compression:
        asked = same.setdefault((rule.algorithm, *sorted(rule.options.items())), rule)
        found |= {layer.name: asked for layer in layers_of(model, rule.layers)}
    return found


def choice_of(rule: Compression, members: int) -> Choice:
    """Return the choice that a rule asks for, for a group of so many ranks."""
    return Choice(*asked(rule, members))


def compressed(decoder: Decoder, mesh: SpanMesh, layouts: Mapping[str, Layout], rules: Rules) -> dict[int, Compression]:
    """The rule of every trained parameter that has one, by its identity."""
    cut = mesh.tp.size > 1 or mesh.etp.size > 1
    alike = {key for key, layout in layouts.items() if cut and layout.local == layout.shape}
    keys = {id(getattr(module, kind)): key for key, module, kind in decoder.named()}
    return {
        id(weight): rules[name]
        for name in decoder.names[::-1]  # a weight that two layers share goes by the first
        if name in rules
        for weight in decoder.layer(name).parameters()
        if weight.requires_grad and keys[id(weight)] not in alike
    }


class Synchronisers:
    """Synchronisers of one span, made when they are first asked for: all ranks of a process group ask in the same order."""

    def __init__(self, rules: Mapping[int, Compression]) -> None:
        self.rules = rules  # by the identity of a parameter
        self.made: list[Synchroniser] = []
        self._by: dict[tuple[int, int], Synchroniser] = {}

    def synchroniser(self, axis: AxisGroup, rule: Compression) -> Synchroniser:
        """Return the synchroniser that sums what a rule names over a process group."""
        key = (id(axis.group), id(rule))
        if key not in self._by:
            self._by[key] = Synchroniser(choice_of(rule, axis.size), OPTIONS, group=axis.group)
            self.made.append(self._by[key])
        return self._by[key]


def compress_shards(decoder: Decoder, mesh: SpanMesh, rules: Mapping[int, Compression]) -> Iterator[Synchroniser]:
    """Have what `fully_shard` cuts sum its gradients as the rules say; experts have replicas of their own."""
    experts = {id(weight) for weight in decoder.experts()}
    sharded = {id(weight) for weight in decoder.parameters() if isinstance(weight, DTensor) and id(weight) in rules}
    for shards, some in ((mesh.shards, sharded - experts), (mesh.expert_shards, sharded & experts)):
        if not some:
            continue
        copies = shards.copies if shards.copies.size > 1 else None
        choose = _chooser({key: rules[key] for key in some}, (copies or shards.axis).size)
        handle = register_sharded(decoder, choose, copies=copies and copies.group, limit=LIMIT)
        yield from handle.synchronisers


def _chooser(rules: Mapping[int, Compression], members: int) -> Callable[[str, Tensor], Choice]:
    """The choice of every parameter, the same one for all that a rule names."""
    made: dict[int, Choice] = {}

    def choose(_: str, weight: Tensor) -> Choice:
        rule = rules.get(id(weight))
        return Choice() if rule is None else made.setdefault(id(rule), choice_of(rule, members))

    return choose
