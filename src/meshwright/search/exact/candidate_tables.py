"""Tables of candidates: choices whose stages have equal devices and equal micro-batches.

Every grid with every micro-batch gets a bound: the time of its layers without recompute and bubble, spread evenly over
all devices. A table also holds an ideal choice that is as good as the best of its choices in every respect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.cost.layers.placement import StagePlacement
from meshwright.models.layer import Recompute
from meshwright.plans import Job
from meshwright.search.bounds.dominance import needless, traits_of, unbeaten
from meshwright.search.bounds.layer_times import alike, alike_experts, all_passes, passes_of
from meshwright.search.bounds.prices import Chain
from meshwright.search.space.candidates import Choices, bare
from meshwright.search.space.grids import Grids, all_grids, bare_grids, divisors, foldings
from meshwright.search.space.limits import Limits

Array = Any


@dataclass(frozen=True)
class Table:
    """Choices whose stages have equal devices and equal micro-batches."""

    size: int  # devices of a stage
    micro_batches: int
    groups: int  # most that the cluster holds
    choices: Choices
    least: Array  # lower bounds in seconds, in rising order
    forward: Array  # (sort,): lower bound of the choices' seconds
    backward: Array
    through: Array  # (sort,): the part of the backward pass that earlier layers wait for
    passed_on: Array  # (sort,): lower bound of the bytes passed to the next layer

    @property
    def bound(self) -> float:
        return float(self.least[0])

    @property
    def seconds(self) -> Array:
        """(sort,): seconds of both passes."""
        return self.forward + self.backward

    @property
    def early(self) -> float:
        """Least part of a layer's time that its forward pass takes."""
        return float((self.forward / np.maximum(self.seconds, 1e-30)).min())

    def head(self, count: int) -> Table:
        """Return the choices of least bound."""
        return replace(
            self, choices=self.choices.take(np.arange(min(count, len(self.least)))), least=self.least[:count]
        )

    @property
    def promise(self) -> float:
        """Bound with a bubble as 1F1B halves it: it orders the tables."""
        return self.bound * (1 + (self.groups - 1) / (2 * self.micro_batches))


@dataclass(frozen=True)
class Frame:
    """Candidates with the times of all layers except experts, which other schedules may overlap more."""

    choices: Choices
    unique: Choices  # one of each kind (`layer_times.alike`)
    back: Array  # (choice,): its kind
    passes: tuple[Array, ...]  # (sort, kind) each, from `passes_of`

    @staticmethod
    def of(job: Job, chain: Chain, site: StagePlacement, choices: Choices) -> Frame:
        first, back = alike(choices, site)
        unique = choices.take(first)
        others = [i for i, layer in enumerate(chain.sorts) if not layer.experts]
        return Frame(choices, unique, back, all_passes(job, chain, unique, site, others))

    def take(self, rows: Array) -> Frame:
        """Return the frame of some choices."""
        used, back = np.unique(self.back[rows], return_inverse=True)
        passes = tuple(part[:, used] for part in self.passes)
        return Frame(self.choices.take(rows), self.unique.take(used), back.reshape(-1), passes)


def framed(job: Job, chain: Chain, site: StagePlacement, limits: Limits, recomputes: Sequence[Recompute]) -> Frame:
    """Return every grid with every number of samples per replica, without dominated ones."""
    frame = Frame.of(job, chain, site, _candidates(job, site, limits))
    if not len(frame.choices):
        return frame
    seconds = chain.counts[-1] @ (frame.passes[0] + frame.passes[1])
    traits = traits_of(job, chain, frame.unique, site, recomputes)
    return frame.take(unbeaten(frame.choices, frame.back, traits, seconds, site))


def tables(job: Job, chain: Chain, site: StagePlacement, limits: Limits, most_groups: int, frame: Frame) -> list[Table]:
    """Return all tables, the most promising first."""
    every, back = frame.choices, frame.back
    if not len(every):
        return []
    forward, backward, through, passed_on = _least(job, chain, site, limits, frame)
    seconds = (chain.counts[-1] @ (forward + backward))[back]
    groups = np.minimum(job.cluster.devices // every.grids.devices, most_groups)
    least = job.global_batch // every.micro_batch * seconds / groups + site.runtime.step_seconds
    keys = numbers(job, every)
    order = np.lexsort((least, keys))
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    found = []
    for rows in np.split(order, starts[1:]):
        one, unique = rows[0], back[rows]
        found.append(
            Table(
                int(every.grids.devices[one]), job.global_batch // int(every.micro_batch[one]), int(groups[one]),
                every.take(rows), least[rows],
                *(part[:, unique].min(axis=1) for part in (forward, backward, through, passed_on)),
            )
        )  # fmt: skip
    return sorted(found, key=lambda table: table.promise)


def numbers(job: Job, choices: Choices) -> Array:
    """Return (choice,): the number of its table."""
    return choices.grids.devices * (job.global_batch + 1) + choices.micro_batch


def least_per_sample(job: Job, chain: Chain, site: StagePlacement, limits: Limits) -> float:
    """Return a lower bound on the device-seconds of one sample, for any division of the batch.

    It assumes that one replica takes the whole batch at once (more samples never cost more per sample), and all devices
    work.
    """
    grids = bare_grids(job, site.fabric, limits)
    if not len(grids):
        return float("inf")
    choices = bare(grids, np.full(len(grids), job.global_batch, dtype=np.int64))
    frame = Frame.of(job, chain, site, choices)
    forward, backward, _, _ = _least(job, chain, site, limits, frame)
    seconds = (chain.counts[-1] @ (forward + backward))[frame.back]
    return float((seconds * grids.devices).min() / job.global_batch)


def _candidates(job: Job, site: StagePlacement, limits: Limits) -> Choices:
    """Return every grid with every number of samples per replica."""
    grids = all_grids(job, site.fabric, limits)
    parts, samples, beaten = [], [], needless(grids, site)
    for size in divisors(job.global_batch):
        if not limits.keeps("micro_batch", size):
            continue
        may = (job.global_batch // grids.dp) % size == 0
        for factor, rows in beaten.items():
            if size % factor == 0 and limits.keeps("micro_batch", size // factor):
                may &= ~rows
        rows = np.flatnonzero(may)
        if "micro_batches" in limits.fixed:
            count = job.global_batch // (grids.dp[rows] * size)
            rows = rows[count == limits.fixed["micro_batches"]]
        parts.append(rows)
        samples.append(np.full(len(rows), size, dtype=np.int64))
    rows = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
    return bare(grids.take(rows), np.concatenate(samples) if samples else rows)


def _least(job: Job, chain: Chain, site: StagePlacement, limits: Limits, frame: Frame) -> tuple[Array, ...]:
    """Return bounds of (sort, kind) for all layers."""
    experts = [i for i, layer in enumerate(chain.sorts) if layer.experts]
    if not experts:
        return frame.passes
    found = tuple(part.copy() for part in frame.passes)
    for part, least in zip(found, _least_experts(job, chain, site, limits, frame.unique, experts), strict=True):
        part[experts] = least
    return found


def _least_experts(
    job: Job, chain: Chain, site: StagePlacement, limits: Limits, choices: Choices, experts: list[int]
) -> list[Array]:
    """Return bounds of (expert sort, choice): the best of all foldings of experts."""
    first, back = alike_experts(choices, site)
    some = choices.take(first)
    every, count = foldings(job, site.fabric, limits), len(first)
    ep, same = (np.repeat(np.array([fold[i] for fold in every]), count) for i in (0, 1))
    u = some.grids.take(np.tile(np.arange(count), len(every)))
    grids = Grids(u.tp, u.sp, u.ulysses, u.ring, u.dp, ep, np.where(same, u.tp, 1), u.order)
    found = passes_of(job, chain, bare(grids, np.tile(some.samples, len(every))), site, experts)
    least = [part[experts].reshape(len(experts), len(every), count).min(axis=1) for part in found]
    return [part[:, back] for part in least]
