"""Times of every kind of layer on grids without recompute, sharding or offload, priced once per equal grids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.cost.layers.layer import layer_time
from meshwright.cost.layers.passes import PASSES, layer_passes
from meshwright.cost.layers.placement import StagePlacement
from meshwright.models import Layer
from meshwright.plans import Job
from meshwright.plans.strategy import Axis
from meshwright.search.bounds.prices import Chain, Columns
from meshwright.search.space.candidates import Choices, priced
from meshwright.search.space.grids import Grids

Array = Any


@dataclass(frozen=True)
class LayerTimes:
    """Layer times as arrays of (sort, choice)."""

    choices: Choices
    forward: Array  # seconds of one micro-batch
    backward: Array
    through: Array  # the part of the backward pass that earlier layers wait for
    passed_on: Array  # bytes passed to the next layer

    @cached_property
    def columns(self) -> Columns:
        """Columns that bounds need of every choice."""
        return self.forward, self.backward, self.backward - self.through, self.passed_on

    def take(self, rows: Array) -> LayerTimes:
        """Return the times of some choices."""
        arrays = (self.forward, self.backward, self.through, self.passed_on)
        return LayerTimes(self.choices.take(rows), *(array[:, rows] for array in arrays))


def timed(job: Job, chain: Chain, choices: Choices, site: StagePlacement) -> LayerTimes:
    """Time all choices; data parallelism does not matter, so few of them differ."""
    return LayerTimes(choices, *all_passes(job, chain, choices, site, range(len(chain.sorts))))


def all_passes(
    job: Job, chain: Chain, choices: Choices, site: StagePlacement, sorts: Iterable[int]
) -> tuple[Array, ...]:
    """Return the result of `passes_of`, with choices that are equal for a kind of layer timed once."""
    found = tuple(np.zeros((len(chain.sorts), len(choices))) for _ in range(4))
    for same in (alike, alike_tokens, alike_experts):
        mine = [i for i in sorts if _same(chain.sorts[i]) is same]
        if mine:
            first, back = same(choices, site)
            for part, some in zip(found, passes_of(job, chain, choices.take(first), site, mine), strict=True):
                part[mine] = some[mine][:, back]
    return found


def alike(choices: Choices, site: StagePlacement) -> tuple[Array, Array]:
    """Return the first choice of each kind, and the kind of every choice.

    Choices of a kind cut all layers except experts equally and use the same links, with any data parallelism.
    """
    g = choices.grids
    links = [part for axis in ("tp", "ulysses", "ring") for part in meeting(g, site, axis)]
    return kinds(g.tp, g.sp, g.ulysses, g.ring, choices.samples, *links)


def alike_tokens(choices: Choices, site: StagePlacement) -> tuple[Array, Array]:
    """Return (first rows, kinds) for layers without attention, which depend only on the tokens per device."""
    g = choices.grids
    return kinds(g.tp, g.sp, choices.samples / (g.ulysses * g.ring), *meeting(g, site, "tp"))


def alike_experts(choices: Choices, site: StagePlacement) -> tuple[Array, Array]:
    """Return (first rows, kinds) for layers of experts."""
    g = choices.grids
    return kinds(g.tp, g.sp, g.ep, g.etp, choices.samples / (g.ulysses * g.ring), *meeting(g, site, "tp"))


def attends(layer: Layer) -> bool:
    """Return True if a layer depends on how a sample's tokens are divided, beyond the number per device."""
    return bool(layer.heads) or any(op.kind == "attention" or any(k.heads for k in op.keeps) for op in layer.ops)


def _same(layer: Layer) -> Callable[[Choices, StagePlacement], tuple[Array, Array]]:
    return alike_experts if layer.experts else alike if attends(layer) else alike_tokens


def kinds(*parts: Array) -> tuple[Array, Array]:
    """Return the first row of each kind, and the kind of every row; rows of a kind agree in all parts."""
    key = np.zeros(len(parts[0]), dtype=np.int64)
    for part in parts:
        count, index = _numbered(part)
        key = key * count + index
    _, first, back = np.unique(key, return_index=True, return_inverse=True)
    return first, back.reshape(-1)


def _numbered(part: Array) -> tuple[int, Array]:
    """Return the number of different values, and the index of each row's value."""
    if part.dtype.kind in "iub" and len(part) and part.max() < len(part) + 1000:  # degrees: no need to sort
        number = np.cumsum(np.bincount(part) > 0) - 1
        return int(number[-1]) + 1, number[part]
    values, index = np.unique(part, return_inverse=True)
    return len(values), index.reshape(-1)


def meeting(grids: Grids, site: StagePlacement, axis: Axis) -> Iterator[Array]:
    """Yield the members of an axis that each tier of links joins, which decide the time of its collectives."""
    for tier in site.fabric.tiers[:-1]:
        yield np.clip(tier.span // grids.strides[axis], 1, getattr(grids, axis))


def passes_of(
    job: Job, chain: Chain, choices: Choices, site: StagePlacement, sorts: Iterable[int]
) -> tuple[Array, ...]:
    """Return arrays of (sort, choice), zero for sorts not asked for.

    They are the seconds of both passes without recompute, the backward pass without weight gradients, and bytes passed
    on.
    """
    configs = priced(choices, job, site.fabric, site.runtime)
    forward, backward, through, passed_on = (np.zeros((len(chain.sorts), len(choices))) for _ in range(4))
    for i in sorts:
        layer = chain.sorts[i]
        time = layer_time(layer, configs.cut, site.chip, site.fabric, site.runtime, configs.place)
        passes = layer_passes(layer, time, configs, site)
        forward[i], backward[i] = (passes.total(when) for when in PASSES)
        through[i] = np.maximum(backward[i] - time.work.weight_gradient, 0.0)
        passed_on[i] = layer.output_bytes(configs.cut)
    return forward, backward, through, passed_on
