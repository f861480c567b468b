"""Configuration of a layer, or thousands of them at once.

A plan's span is one configuration. A search prices all its candidates in one call. Every field is a number, or a numpy
array with one entry per configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.cost.layers.collectives import Counts
from meshwright.cost.layers.layer import Placement
from meshwright.cost.layers.placement import StagePlacement
from meshwright.cost.runtime import Runtime, cut_of
from meshwright.models import Layer, Slice
from meshwright.plans import Job, Span
from meshwright.plans.spans import alike

Array = Any


@dataclass(frozen=True)
class Replicas:
    """Devices that hold the same parameters."""

    count: Array
    shards: Array  # pieces that ZeRO cuts their states into
    joined: Counts  # number of them that each tier of links joins


@dataclass(frozen=True)
class LayerConfig:
    """Cut of a layer, placement of its groups, and its sharded or offloaded parts."""

    cut: Slice
    place: Placement
    dense: Replicas
    experts: Replicas
    zero: Array = 0
    offload_activations: Array = 0.0
    offload_optimizer: Array = 0.0
    offload_parameters: Array = 0.0
    swapped: Array = 0.0

    @staticmethod
    def of(span: Span, samples: int, job: Job, site: StagePlacement) -> LayerConfig:
        """Return the configuration of a span whose replica takes `samples` of a micro-batch."""
        return LayerConfig._of(span, samples, job, site.runtime, *site.joined(span))

    @staticmethod
    def anywhere(span: Span, samples: int, job: Job, runtime: Runtime) -> LayerConfig:
        """Return the configuration of a span without distances between devices, enough for bytes."""
        return LayerConfig._of(span, samples, job, runtime, Placement(), (), ())

    @staticmethod
    def _of(
        span: Span, samples: int, job: Job, runtime: Runtime, place: Placement, same: Counts, same_experts: Counts
    ) -> LayerConfig:
        return LayerConfig(
            cut_of(span, samples, job, runtime), place,
            Replicas(span.replicas, span.shards(span.replicas), same),
            Replicas(span.expert_replicas, span.shards(span.expert_replicas), same_experts),
            span.zero, span.offload.activations, span.offload.optimizer, span.offload.parameters,
            span.swap.activations if span.swap else 0.0,
        )  # fmt: skip

    @property
    def here(self) -> Array:
        """Fraction of the activations that is neither offloaded nor swapped."""
        return 1 - self.offload_activations - self.swapped


@dataclass(frozen=True)
class Held:
    """Parameters on one device, and the devices that hold the same."""

    count: Array
    trained: Array  # of these, those that have gradients
    replicas: Replicas


def parameter_groups(layers: Sequence[Layer], ways: LayerConfig) -> tuple[Held, Held]:
    """Return dense parameters, then experts: they are replicated over different devices."""
    kinds = alike(layers)
    experts = sum(n * layer.expert_parameters_on(ways.cut) for layer, n in kinds)
    dense = sum(n * layer.parameters_on(ways.cut) for layer, n in kinds) - experts
    frozen = sum(n * layer.frozen_parameters_on(ways.cut) for layer, n in kinds)
    return Held(dense, dense - frozen, ways.dense), Held(experts, experts, ways.experts)
