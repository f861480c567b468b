"""Grids that another one beats in every respect, left out before anything else is done with them.

Compared are grids of as many devices and samples with the same tensor parallelism, whose replicas lie alike: they hold
the same weights and states, sum gradients over the same links, and fold experts in the same ways, so that no ZeRO level
or offload sets them apart. What differs is how tokens are divided: by sample, by head or by place in the sequence. A
grid that takes no more time or memory for any layer, whatever is repeated, can do all that the other can: the same
layers repeat the same, as much fits, and no pass takes longer. (A longer pass hides more of the gradients behind it, by
no more than it is longer; the longest path through a pipeline has that pass on it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.cost.layer import layer_times
from meshwright.cost.site import Site
from meshwright.cost.transient import gradient_bytes
from meshwright.model.layer import Recompute
from meshwright.plan import Job
from meshwright.search.prices import Chain
from meshwright.search.timed import attends, kinds, meeting
from meshwright.search.ways import Choices, inside, priced

Array = Any
_ALIKE = 1e-12  # of a trait: differences that come from rounding
_LEADERS = 6  # fastest grids of those alike, which the others are compared with


def unbeaten(choices: Choices, back: Array, traits: Array, seconds: Array, site: Site) -> Array:
    """Rows that none of the fastest of those like them beats, in order.

    `back`: the kind of every choice (`timed.alike`); `traits` of (trait, kind), less is better; `seconds` of each kind.
    """
    g = choices.grids
    near = [inside(g, ("ulysses", "ring", "dp"), tier.span) for tier in site.fabric.tiers[:-1]]
    first, group = kinds(g.devices, choices.micro_batch, g.tp, g.sp, *meeting(g, site, "tp"), *near)
    order = np.lexsort((back, seconds[back], group))
    starts = np.searchsorted(group[order], np.arange(len(first)))
    sizes = np.diff(starts, append=len(order))
    kept, count = np.ones(len(order), dtype=bool), traits.shape[1]
    for place in range(_LEADERS):
        lead = order[np.minimum(starts + place, starts + sizes - 1)]  # of every group
        rows = np.flatnonzero(kept & kept[lead[group]])
        rows = rows[lead[group[rows]] != rows]
        pairs, which = np.unique(back[lead[group[rows]]] * count + back[rows], return_inverse=True)
        better, worse = pairs // count, pairs % count
        beats = (traits[:, better] <= traits[:, worse] + _ALIKE * np.abs(traits[:, worse])).all(axis=0)
        kept[rows[beats[which.reshape(-1)]]] = False
    return np.flatnonzero(kept)


def traits_of(job: Job, chain: Chain, choices: Choices, site: Site, recomputes: Sequence[Recompute]) -> Array:
    """(trait, choice): seconds and bytes of every sort of layer with attention, whatever is repeated.

    Others take the same for all choices with as many tokens on a device.
    """
    ways = priced(choices, job, site.fabric, fused_attention=site.runtime.attention != "unfused")
    cut, count, rows = ways.cut, len(choices), [np.zeros(len(choices))]
    for layer in filter(attends, chain.sorts):
        time = layer_times(layer, cut, site.chip, site.fabric, site.runtime, ways.place, recomputes)
        kept = [layer.kept_bytes(cut, r) for r in recomputes]
        whole = layer.kept_bytes(cut, "none")
        weight = time.work.weight_gradient  # the same, or what waits for it may differ either way
        rows += [
            time.forward, *time.backward, weight, -weight, time.work.kernels, *kept, *(whole - some for some in kept),
            gradient_bytes([layer], cut, site.runtime), layer.input_bytes(cut), layer.output_bytes(cut),
        ]  # fmt: skip
    return np.stack([np.broadcast_to(row, (count,)) for row in rows])
