"""Choose the layers of a plan that send compressed gradients: those with exposed all-reduces, if it is worth it.

Numbers, replicas, links and the time of the backward pass are the cost model's. Equal layers get one strategy, and
kinds of layers differ only if that is worth it, so that plans stay short. What a run would refuse is not chosen, and
gradients shared between pipelines of a plan stay uncompressed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

from msgspec import to_builtins

from meshwright.clusters import Device
from meshwright.compression.auto.choose import WIDE, Costs, Decision, priced, worth
from meshwright.compression.auto.inputs import Cost, Facts, Link, Unit, Way
from meshwright.compression.auto.microbenchmark import Rehearsal
from meshwright.compression.auto.rules import rules
from meshwright.compression.auto.simulation import Leg, Strand
from meshwright.compression.planning.grid import TIMES, link_of, sent_by, short
from meshwright.compression.planning.plan_gradients import Summed, gradients
from meshwright.compression.planning.scaled_costs import Scaled, rehearsable, topology
from meshwright.compression.preflight import Tell
from meshwright.compression.threads import one_thread
from meshwright.cost.compression import HOST_COPIES, kernel_seconds
from meshwright.cost.layers.collectives import exchange_seconds, reduce_parts
from meshwright.plans import Compression, Job, Plan

# Costs on an accelerator that is not here: legs and bytes as benchmarked on a CPU, work from the cost model.


@dataclass(frozen=True)
class Accelerated:
    """Costs for `decide` on an accelerator.

    Kernels split a strand's work in the proportions that its legs have on a CPU. Messages are copied to and from host
    memory, which is part of a leg's work, since one thread starts both and waits.
    """

    costs: Costs
    device: Device

    def __call__(self, way: Way, shapes: tuple[tuple[int, ...], ...]) -> list[Strand]:
        strands = self.costs(way, shapes)
        if way.exact:  # the backend's own all-reduce, whose time is the link's
            return [tuple(replace(leg, work=0.0) for leg in strand) for strand in strands]
        rehearsed = sum(leg.work for strand in strands for leg in strand)
        kernels = 4 * sum(map(prod, shapes)) * kernel_seconds(self.device)
        return [tuple(self._leg(leg, kernels / rehearsed) for leg in strand) for strand in strands]

    def _leg(self, leg: Leg, faster: float) -> Leg:
        return replace(leg, work=leg.work * faster + HOST_COPIES * leg.sent / self.device.host_bandwidth)


_HIDDEN = 0.02  # share of a step: a smaller exposed part need not be shortened
_WORTH = 0.02  # share of a step that another strategy for one kind of layers must save: plans stay short


@dataclass(frozen=True)
class Row:
    """Equal layers on one device, and their strategy."""

    layers: tuple[str, ...]
    part: str  # of their parameters: dense, experts
    numbers: int  # of one layer
    replicas: int
    way: Way | None  # None: they are not summed once a step
    sent: int  # bytes that each rank sends for one layer
    why: str


@dataclass(frozen=True)
class Planned:
    """Decision for a plan."""

    rows: tuple[Row, ...]
    seconds: float  # of the last backward pass and the all-reduces, on the slowest device
    plain: float  # the same without compression
    steps: float
    compression: tuple[Compression, ...]
    link: str  # in words
    codecs: str  # source of the codecs' speed, in words

    @property
    def speed_up(self) -> float:
        """Speed-up of the last backward pass with its all-reduces, in training to the same loss."""
        return self.plain / (self.seconds * self.steps) if self.seconds else 1.0

    def to_table(self) -> dict[str, Any]:
        return {
            "link": self.link,
            "codecs": self.codecs,
            "rows": [_facts(row) for row in self.rows],
            "seconds": self.seconds,
            "plain_seconds": self.plain,
            "steps": self.steps,
            "speed_up": self.speed_up,
            "compression": [to_builtins(rule) for rule in self.compression],
        }


def _facts(row: Row) -> dict[str, Any]:
    return {
        "layers": list(row.layers),
        "part": row.part,
        "numbers": row.numbers,
        "replicas": row.replicas,
        "way": short(row.way) if row.way else "none",
        "topology": topology(row.way) if row.way else "",
        "sent_bytes": row.sent,
        "why": row.why,
    }


def planned(
    job: Job, plan: Plan, ways: Sequence[Way], runtime: str, link: tuple[float, float] | None, tell: Tell
) -> Planned:
    """Decide for a plan; `link` is Mbit/s and seconds of latency if they are not the cluster's."""
    pools = gradients(job, plan, runtime)
    rehearsals: dict[int, Rehearsal] = {}
    device = _slowest(job)
    found: list[_Pool] = []
    with one_thread():
        for done, pool in enumerate(pools):
            tell(f"timing ways for {pool[0].replicas} replicas", done, len(pools))
            rehearsal = rehearsals.setdefault(pool[0].replicas, Rehearsal(pool[0].replicas, times=TIMES))
            found.append(_decided(pool, ways, link, rehearsal, device))
        chosen = _one_for_each_layer(found)
        found = [one.gone(chosen) for one in found]
    rows = [row for one in found for row in one.rows()]
    pairs = [one.pair for one in found if one.pair]
    worst = max(pairs, key=lambda pair: pair[1].price, default=None)
    best, plain = worst or (None, None)
    compression = rules(chosen, job.model)
    seconds, steps = (best.times.step, best.steps) if best else (0.0, 1.0)
    said = f"{link[0]:g} Mbit/s and {link[1] * 1e3:g} ms" if link else "the cluster's links"
    codecs = f"reckoned for {device.title}" if device else "timed on this machine's processor"
    return Planned(_joined(rows), seconds, plain.times.step if plain else 0.0, steps, compression, said, codecs)


def _decided(
    pool: Sequence[Summed],
    ways: Sequence[Way],
    link: tuple[float, float] | None,
    rehearsal: Rehearsal,
    device: Device | None,
) -> _Pool:
    """Decide for gradients that share their replicas."""
    kept = [one for one in pool if not one.alone]
    alone = [_row([one], None, 0, one.alone) for one in pool if one.alone]
    if not kept:
        return _Pool(alone)
    first = kept[0]
    costs: Costs = Scaled(rehearsal, first.width, first.sharded)
    costs = Accelerated(costs, device) if device else costs
    units = tuple(Unit(place, one.shapes) for place, one in enumerate(kept))
    used = link_of(first.replicas, *link) if link else _link(first)
    cores = inf if device else float(len(os.sched_getaffinity(0)))  # an accelerator's host has nothing else to compute
    facts = Facts(tuple(one.ready for one in kept), units, first.replicas, used, cores)
    possible = _possible(first, ways)
    tied = _Tied(facts, possible, costs, [one.sort for one in kept])
    return _Pool(alone, kept, facts, costs, possible, tied, tied.best())


@dataclass(frozen=True)
class _Pool:
    """Gradients that share their replicas, and their strategies."""

    alone: list[Row]
    kept: Sequence[Summed] = ()
    facts: Facts | None = None
    costs: Costs | None = None
    possible: Sequence[Way] = ()
    tied: _Tied | None = None
    best: Decision | None = None

    @property
    def pair(self) -> tuple[Decision, Decision] | None:
        """Predictions with and without compression."""
        return (self.best, self.tied.plain) if self.best and self.tied else None

    def gone(self, chosen: Mapping[str, Way]) -> _Pool:
        """Return the pool with the chosen strategy for each layer."""
        if not (self.best and self.facts and self.costs):
            return self
        ways = [chosen[one.layer] for one in self.kept]
        return self if tuple(ways) == self.best.ways else replace(self, best=priced(self.facts, ways, self.costs))

    def rows(self) -> list[Row]:
        found = list(self.alone)
        if not (self.best and self.facts and self.costs and self.tied):
            return found
        for sort, way in dict.fromkeys((one.sort, way) for one, way in zip(self.kept, self.best.ways, strict=True)):
            pairs = zip(self.kept, self.best.ways, strict=True)
            alike = [one for one, gone in pairs if (one.sort, gone) == (sort, way)]
            one = replace(self.facts, ready=self.facts.ready[:1], units=(Unit(0, alike[0].shapes),))
            sent = sent_by(self.costs, replace(self.best, ways=(way,)), one)
            found.append(_row(alike, way, sent, self.tied.why(self.best, sort, way)))
        return found


def _one_for_each_layer(pools: Sequence[_Pool]) -> dict[str, Way]:
    """Return one strategy per layer, since plans name layers.

    If a layer's experts would differ from the rest, all get the strategy of more numbers that is possible for both.
    """
    wanted: dict[str, list[tuple[int, Way]]] = {}
    possible: dict[str, set[Way]] = {}
    for pool in pools:
        for one, way in zip(pool.kept, pool.best.ways if pool.best else (), strict=True):
            wanted.setdefault(one.layer, []).append((one.numbers, way))
            possible[one.layer] = possible.get(one.layer, set(pool.possible)) & set(pool.possible)
    found = {}
    for name, some in wanted.items():
        ranked = [way for _, way in sorted(some, key=lambda pair: -pair[0]) if way in possible[name]]
        exact = next(way for way in possible[name] if way.exact)
        found[name] = next(iter(ranked), exact)
    return found


def _slowest(job: Job) -> Device | None:
    """Return the accelerator that encodes slowest, or None if a plan runs on CPUs."""
    devices = [group.device for group in job.cluster.groups]
    if any(device.architecture == "cpu" for device in devices):
        return None
    return min(devices, key=lambda device: device.memory_bandwidth)


def _possible(of: Summed, ways: Sequence[Way]) -> tuple[Way, ...]:
    """Return the possible strategies: shards are summed at their owners, so codecs must not need whole gradients."""
    fit = rehearsable(ways, of.replicas)
    return tuple(way for way in fit if not of.sharded or topology(way) in ("all-reduce", "scatter"))


def _row(alike: Sequence[Summed], way: Way | None, sent: int, why: str) -> Row:
    one = alike[0]
    return Row(tuple(other.layer for other in alike), one.part, one.numbers, one.replicas, way, sent, why)


def _link(of: Summed) -> Link:
    """Return the cluster's link between these replicas: all to all, and its all-reduce."""
    n, fabric = of.replicas, of.fabric
    round_ = [float(exchange_seconds(fabric, moved, n, of.joined)) for moved in (0.0, 1e9)]
    per_byte, once = (float(part) for part in reduce_parts(fabric, n, of.joined))
    away = (n - 1) / n  # share of a rank's data that goes to others
    return Link(Cost((round_[1] - round_[0]) / 1e9 / away, round_[0]), Cost(per_byte / (2 * away), once))


class _Tied:
    """Best strategies if gradients of one kind share one."""

    def __init__(self, facts: Facts, ways: Sequence[Way], costs: Costs, sorts: Sequence[object]) -> None:
        self._facts, self._ways, self._costs, self._sorts = facts, list(ways), costs, list(sorts)
        self._exact = next(way for way in ways if way.exact)
        self.plain = self._priced(dict.fromkeys(self._sorts, self._exact))
        uniform = [(self._priced(dict.fromkeys(self._sorts, way)), way) for way in self._ways]
        self._uniform = sorted(uniform, key=lambda pair: pair[0].price)
        self._narrow = self._few(self._uniform)

    def best(self) -> Decision:
        """Return the best decision that is worth it."""
        near = [(decision, way) for decision, way in self._uniform if way.near]
        return worth(self.plain, self._improved(near), self._improved(self._uniform))

    def _few(self, uniform: Sequence[tuple[Decision, Way]]) -> list[Way]:
        return list(dict.fromkeys([*(way for _, way in uniform[:WIDE]), self._exact]))

    def _improved(self, uniform: Sequence[tuple[Decision, Way]]) -> Decision:
        """Change the strategy of one kind after the other as long as that helps."""
        best, way = uniform[0]
        chosen: dict[object, Way] = dict.fromkeys(self._sorts, way)
        changed = True
        while changed:
            changed = False
            for sort in chosen:
                for other in self._few(uniform):
                    tried = self._priced({**chosen, sort: other})
                    if tried.price < best.price * (1 - _WORTH):
                        best, chosen, changed = tried, {**chosen, sort: other}, True
        return best

    def why(self, best: Decision, sort: object, way: Way) -> str:
        """Return the saving of a strategy in the step; for exact sums that of the next best."""
        now = dict(zip(self._sorts, best.ways, strict=True))
        if not way.exact:
            saved = 1 - best.price / self._priced({**now, sort: self._exact}).price
            return f"saves {saved:.0%} of the step" if saved >= _WORTH else "goes with the others"
        late = self.plain.times.step - self.plain.times.computing
        if late < _HIDDEN * self.plain.times.step:
            return "hides under the backward pass"
        others = [other for other in self._narrow if not other.exact]
        tried, other = min(((self._priced({**now, sort: other}), other) for other in others), key=lambda p: p[0].price)
        gain = 1 - tried.price / best.price
        if gain < -_WORTH:
            return f"{short(other)} would take {-gain:.0%} longer"
        return f"{short(other)} would save {max(gain, 0.0):.0%} only"

    def _priced(self, chosen: Mapping[Any, Way]) -> Decision:
        return priced(self._facts, [chosen[sort] for sort in self._sorts], self._costs)


def _joined(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Merge rows of equal gradients and strategies: stages of a pipeline are often equal."""
    found: dict[Row, Row] = {}
    for row in rows:
        key = replace(row, layers=(), why="")
        known = found.setdefault(key, replace(row, layers=()))
        found[key] = replace(known, layers=(*known.layers, *row.layers))
    return tuple(found.values())
