"""Drop grids that another grid dominates, before they are priced.

Compared grids have equal devices and samples, equal tensor parallelism, and replicas on the same links. They hold the
same weights and states, reduce gradients over the same links, and fold experts equally. No ZeRO level or offload
therefore separates them. They differ in how tokens are divided: by sample, by head or by position in the sequence.

A grid dominates if no layer takes more time or memory, whatever is recomputed. It can then do all that the other can:
the same layers recompute the same, as much fits, and no pass takes longer. (A longer pass overlaps more gradients, but
by no more than it is longer, and it lies on the pipeline's longest path.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwright.cost.layers.layer import layer_times
from meshwright.cost.layers.placement import StagePlacement
from meshwright.cost.memory.transient import gradient_bytes
from meshwright.models.layer import Recompute
from meshwright.plans import Job
from meshwright.plans.strategy import Axis
from meshwright.search.bounds.layer_times import attends, kinds, meeting
from meshwright.search.bounds.prices import Chain
from meshwright.search.space.candidates import Choices, inside, priced
from meshwright.search.space.grids import Grids

Array = Any
_CONTEXT: tuple[Axis, ...] = ("ulysses", "ring")  # axes that divide a sample's tokens
_ALIKE = 1e-12  # relative difference of traits that comes from rounding
_LEADERS = 6  # fastest grids of a class, which the others are compared with


def needless(grids: Grids, site: StagePlacement) -> dict[int, Array]:
    """Return, by prime factor, the grids that could divide samples by it instead of each sample's tokens.

    With that factor more samples per replica, the grid with that factor more replicas dominates them. A device has the
    same tokens, more of them from one sample, so fewer keys and values are communicated over the same links.
    """
    found, links = {}, [*meeting(grids, site, "tp"), *_near(grids, site)]
    for factor in (2, 3, 5, 7):
        may = np.zeros(len(grids), dtype=bool)
        for axis in _CONTEXT:
            rows = np.flatnonzero(getattr(grids, axis) % factor == 0)
            some = grids.take(rows)
            less = dataclasses.replace(some, **{axis: getattr(some, axis) // factor, "dp": some.dp * factor})
            context = [np.minimum(part, getattr(less, name)) for name in _CONTEXT for part in meeting(some, site, name)]
            wanted = [*_degrees(less), *context, *(part[rows] for part in links)]
            there = [*_degrees(grids), *(part for name in _CONTEXT for part in meeting(grids, site, name)), *links]
            _, kind = kinds(*map(np.concatenate, zip(there, wanted, strict=True)))
            may[rows] |= np.isin(kind[len(grids) :], kind[: len(grids)])
        found[factor] = may
    return found


def _degrees(grids: Grids) -> list[Array]:
    return [grids.tp, grids.sp, grids.ulysses, grids.ring, grids.dp]


def _near(grids: Grids, site: StagePlacement) -> list[Array]:
    """Return the number of weight replicas that each tier of links joins."""
    return [inside(grids, ("ulysses", "ring", "dp"), tier.span) for tier in site.fabric.tiers[:-1]]


def unbeaten(choices: Choices, back: Array, traits: Array, seconds: Array, site: StagePlacement) -> Array:
    """Return the rows that none of the fastest in their class dominates, in order.

    `back`: the kind of every choice (`layer_times.alike`). `traits` of (trait, kind): less is better. `seconds`: per kind.
    """
    g = choices.grids
    first, group = kinds(g.devices, choices.micro_batch, g.tp, g.sp, *meeting(g, site, "tp"), *_near(g, site))
    order = np.lexsort((back, seconds[back], group))
    starts = np.searchsorted(group[order], np.arange(len(first)))
    sizes = np.diff(starts, append=len(order))
    kept, count = np.ones(len(order), dtype=bool), traits.shape[1]
    for place in range(_LEADERS):
        lead = order[np.minimum(starts + place, starts + sizes - 1)]  # per class
        rows = np.flatnonzero(kept & kept[lead[group]])
        rows = rows[lead[group[rows]] != rows]
        pairs, which = np.unique(back[lead[group[rows]]] * count + back[rows], return_inverse=True)
        better, worse = pairs // count, pairs % count
        beats = (traits[:, better] <= traits[:, worse] + _ALIKE * np.abs(traits[:, worse])).all(axis=0)
        kept[rows[beats[which.reshape(-1)]]] = False
    return np.flatnonzero(kept)


def traits_of(job: Job, chain: Chain, choices: Choices, site: StagePlacement, recomputes: Sequence[Recompute]) -> Array:
    """Return (trait, choice): seconds and bytes of every kind of layer with attention, under any recompute.

    Other layers cost the same for all choices with equal tokens per device.
    """
    configs = priced(choices, job, site.fabric, site.runtime)
    cut, count, rows = configs.cut, len(choices), [np.zeros(len(choices))]
    for layer in filter(attends, chain.sorts):
        time = layer_times(layer, cut, site.chip, site.fabric, site.runtime, configs.place, recomputes)
        kept = [layer.kept_bytes(cut, r) for r in recomputes]
        whole = layer.kept_bytes(cut, "none")
        talks: Array = sum(t.forward for t in time.transfers.values())
        meets: Array = np.where(talks > 0, 1.0, 0.0)  # 1 where a device waits for others
        weight = time.work.weight_gradient  # must be equal, or the tensors that wait for it may differ either way
        rows += [
            time.forward, *time.backward, weight, -weight, time.work.kernels, *kept, *(whole - some for some in kept),
            meets, gradient_bytes([layer], cut, site.runtime), layer.input_bytes(cut), layer.output_bytes(cut),
        ]  # fmt: skip
    return np.stack([np.broadcast_to(row, (count,)) for row in rows])
