"""Forward and backward pass of a layer on one device: computation, communication, and concurrent transfers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.cost.layers.collectives import gather_parts, send_seconds
from meshwright.cost.layers.layer import LayerTime
from meshwright.cost.layers.layer_config import LayerConfig, parameter_groups
from meshwright.cost.layers.placement import StagePlacement
from meshwright.cost.layers.rank_groups import halves
from meshwright.models import Layer

Array = Any
BACKWARD_KERNELS = 1.6  # kernels of the backward pass over those of the forward pass, as autograd issues them
Part = tuple[str, str]  # (forward or backward, part)
PASSES = ("forward", "backward")


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch in one layer."""

    spent: dict[Part, Array] = field(default_factory=dict)  # on the device; adds up to the two passes
    hidden: dict[Part, Array] = field(default_factory=dict)  # communication overlapped with computation
    weight_gradient: Array = 0.0  # the part of the backward pass that can be delayed (zero-bubble schedules)

    def total(self, when: str) -> Array:
        return sum(seconds for (which, _), seconds in self.spent.items() if which == when)


def layer_passes(
    layer: Layer, time: LayerTime, ways: LayerConfig, site: StagePlacement, kept: Array = 0.0, parked: int | None = None
) -> Passes:
    """Return the passes of a layer whose own work and communication take `time`.

    Sharded weights, offloaded and swapped tensors move at the same time, overlapped at the price of contention. The
    device waits if the host issues kernels more slowly than they run. `kept` is the bytes a micro-batch keeps until its
    backward pass, of which a part may be offloaded or swapped. `parked` is the device that swaps go to.
    """
    found = Passes(*_own(time), weight_gradient=time.work.weight_gradient)
    window = {when: found.total(when) for when in PASSES}  # seconds with which a transfer may overlap
    for name, both in _beside(layer, ways, kept, site, parked).items():
        # Sharded weights are gathered ahead of the forward pass, gradients scattered after the backward pass.
        ours = (site.runtime.overlap_parameters, site.runtime.overlap_gradients) if name == "zero" else (True, True)
        for when, moved, hides in zip(PASSES, both, ours, strict=True):
            under = np.minimum(moved, window[when]) if hides else 0.0
            window[when] = window[when] + moved - under  # others continue while the device waits for this one
            found.spent[when, name] = moved - under + site.constants.contention * under
            found.hidden[when, name] = under
    _wait_for_host(found, time.work.kernels, ways, site)
    return found


def _own(time: LayerTime) -> tuple[dict[Part, Array], dict[Part, Array]]:
    spent: dict[Part, Array] = {
        ("forward", "compute"): time.work.forward,
        ("backward", "compute"): time.work.input_gradient + time.work.weight_gradient,
        ("backward", "recompute"): time.work.recompute,
    }
    hidden: dict[Part, Array] = {}
    for axis, t in time.transfers.items():
        spent["forward", axis] = t.forward_exposed
        spent["backward", axis] = t.backward_exposed + t.repeated
        hidden["forward", axis] = t.forward - t.forward_exposed
        hidden["backward", axis] = t.backward - t.backward_exposed
    return spent, hidden


def _wait_for_host(found: Passes, kernels: Array, ways: LayerConfig, site: StagePlacement) -> None:
    """Add the wait for the host, which issues kernels, and collectives of ZeRO.

    Where ZeRO shards every micro-batch anew, it gathers twice and scatters once; see `settled`.
    """
    issued = kernels * site.runtime.kernels * site.runtime.host_seconds
    power, zero = site.constants.host_overlap, np.asarray(ways.zero)
    each = (np.asarray(ways.dense.shards) > 1) * site.shard
    gather, scatter = each * (zero == 3), each * (zero >= 2)
    for when, host in (("forward", issued + gather), ("backward", BACKWARD_KERNELS * issued + gather + scatter)):
        device = found.total(when)
        found.spent[when, "host"] = (device**power + host**power) ** (1 / power) - device


def _beside(
    layer: Layer, ways: LayerConfig, kept: Array, site: StagePlacement, parked: int | None
) -> dict[str, tuple[Array, Array]]:
    """Return the seconds of transfers during a layer's forward and backward pass, by cause."""
    found: dict[str, tuple[Array, Array]] = {}
    if np.any(np.asarray(ways.zero) >= 2):
        gather, scatter = _sharding(layer, ways, site)
        found["zero"] = (gather, gather + scatter)
    swaps = parked is not None and bool(ways.swapped)
    if np.any(ways.offload_activations) or np.any(ways.offload_parameters):
        shards = np.where(np.asarray(ways.zero) == 3, ways.dense.shards, 1)
        weights = layer.parameters_on(ways.cut) * ways.offload_parameters / shards
        moved = kept * ways.offload_activations + site.parameter_bytes * weights
        found["offload"] = (moved / site.host, moved / site.host)
    if swaps and parked is not None:
        seconds = send_seconds(site.cluster, float(kept * ways.swapped), site.ranks[0], parked, site.constants)
        found["swap"] = (seconds, seconds)
    return found


def _sharding(layer: Layer, ways: LayerConfig, site: StagePlacement) -> tuple[Array, Array]:
    """Return the seconds to gather a layer's weights and to scatter its gradients, once each.

    ZeRO-2 only scatters.
    """
    gather: Array = 0.0
    scatter: Array = 0.0
    zero = np.asarray(ways.zero)
    for held in parameter_groups([layer], ways):
        shards = np.asarray(held.replicas.shards)
        used = (shards > 1) & (held.count > 0)
        inside, _ = halves(held.replicas.joined, shards, held.replicas.count)
        per_byte, once = gather_parts(site.fabric, shards, inside)
        once = 0.0 if site.shard else once  # measured with tiny layers, so `shard` is all latency
        gather = gather + (used & (zero == 3)) * (held.count * site.parameter_bytes * per_byte + once)
        scatter = scatter + (used & (zero >= 2)) * (held.trained * site.gradient_bytes * per_byte + once)
    return gather, scatter
