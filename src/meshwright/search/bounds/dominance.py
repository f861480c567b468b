"""Grids that another one beats in every respect, left out before anything else is done with them.

Compared are grids of as many devices and samples with the same tensor parallelism, whose replicas lie alike: they hold
the same weights and states, sum gradients over the same links, and fold experts in the same ways, so that no ZeRO level
or offload sets them apart. What differs is how tokens are divided: by sample, by head or by place in the sequence. A
grid that takes no more time or memory for any layer, whatever is repeated, can do all that the other can: the same
layers repeat the same, as much fits, and no pass takes longer. (A longer pass hides more of the gradients behind it, by
no more than it is longer; the longest path through a pipeline has that pass on it.)
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
_ALIKE = 1e-12  # of a trait: differences that come from rounding
_LEADERS = 6  # fastest grids of those alike, which the others are compared with


def needless(grids: Grids, site: StagePlacement) -> dict[int, Array]:
    """By a prime factor: grids that could divide samples instead of the tokens of each, so many times less of it.

    With as many times the samples each, they are beaten by the grid with as many times the replicas: a device has the
    same tokens, and more of them are of one sample, so that fewer keys and values travel, over the same links.
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
    """How many replicas of the weights each tier of links joins."""
    return [inside(grids, ("ulysses", "ring", "dp"), tier.span) for tier in site.fabric.tiers[:-1]]


def unbeaten(choices: Choices, back: Array, traits: Array, seconds: Array, site: StagePlacement) -> Array:
    """Rows that none of the fastest of those like them beats, in order.

    `back`: the kind of every choice (`timed.alike`); `traits` of (trait, kind), less is better; `seconds` of each kind.
    """
    g = choices.grids
    first, group = kinds(g.devices, choices.micro_batch, g.tp, g.sp, *meeting(g, site, "tp"), *_near(g, site))
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


def traits_of(job: Job, chain: Chain, choices: Choices, site: StagePlacement, recomputes: Sequence[Recompute]) -> Array:
    """(trait, choice): seconds and bytes of every sort of layer with attention, whatever is repeated.

    Others take the same for all choices with as many tokens on a device.
    """
    ways = priced(choices, job, site.fabric, site.runtime)
    cut, count, rows = ways.cut, len(choices), [np.zeros(len(choices))]
    for layer in filter(attends, chain.sorts):
        time = layer_times(layer, cut, site.chip, site.fabric, site.runtime, ways.place, recomputes)
        kept = [layer.kept_bytes(cut, r) for r in recomputes]
        whole = layer.kept_bytes(cut, "none")
        talks: Array = sum(t.forward for t in time.transfers.values())
        meets: Array = np.where(talks > 0, 1.0, 0.0)  # with others, for whom it waits
        weight = time.work.weight_gradient  # the same, or what waits for it may differ either way
        rows += [
            time.forward, *time.backward, weight, -weight, time.work.kernels, *kept, *(whole - some for some in kept),
            meets, gradient_bytes([layer], cut, site.runtime), layer.input_bytes(cut), layer.output_bytes(cut),
        ]  # fmt: skip
    return np.stack([np.broadcast_to(row, (count,)) for row in rows])
