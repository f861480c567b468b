"""Prices of every kind of layer under every choice: seconds, bytes, and the end of a step.

One call of the cost model prices all choices. A model's blocks repeat a few kinds of layers, so a stage is a sum of a
few columns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.cost.layers.layer import layer_times
from meshwright.cost.layers.layer_config import LayerConfig
from meshwright.cost.layers.passes import PASSES, layer_passes
from meshwright.cost.layers.placement import StagePlacement
from meshwright.cost.memory.device_memory import Bytes, is_processor, loose_share, state_bytes
from meshwright.cost.memory.transient import gathered_bytes, gradient_bytes, gradient_shapes
from meshwright.cost.step.update import settled, update_seconds
from meshwright.models import Layer, Model
from meshwright.plans import Job
from meshwright.plans.spans import alike, sort_of
from meshwright.search.bounds.relaxation import Relaxed, relaxed
from meshwright.search.space.activation_modes import Mode, recomputes
from meshwright.search.space.candidates import Choices, joined, priced

Array = Any
Needs = tuple[tuple[tuple[str, int, int], ...], ...]  # of layers elsewhere, by stage: how, which layer, for which sort
Columns = tuple[Array, Array, Array, Array]  # (sort, choice): forward, backward, weight gradient, bytes passed on


@dataclass(frozen=True)
class Chain:
    """Model as a chain: the kind of each layer, and the pieces of blocks it consists of."""

    model: Model
    sorts: tuple[Layer, ...]
    sort: Array  # of each layer
    pieces: tuple[tuple[Layer, ...], ...]  # kinds of blocks, and of their parts; layers outside blocks stand alone
    block: Array  # (layer, 2): start of its block, and its end
    _kinds: Array  # (layer, layers): the piece formed by so many layers of a block from here on
    _found: dict[tuple[int, int], Array] = field(default_factory=dict)

    @staticmethod
    def of(model: Model) -> Chain:
        sorts = [layer for layer, _ in alike(model.layers)]
        index = {sort_of(layer): i for i, layer in enumerate(sorts)}
        members: dict[str, list[int]] = {}
        for i, layer in enumerate(model.layers):
            members.setdefault(layer.block or layer.name, []).append(i)
        known: dict[tuple[object, ...], int] = {}
        pieces: list[tuple[Layer, ...]] = []
        block = np.array([(members[x.block or x.name][0], members[x.block or x.name][-1] + 1) for x in model.layers])
        kinds = np.zeros((len(model.layers), max(map(len, members.values())) + 1), dtype=np.int64)
        for first, last in np.unique(block, axis=0).tolist():
            for low in range(first, last):
                for high in range(low + 1, last + 1):
                    key = tuple(map(sort_of, model.layers[low:high]))
                    if key not in known:
                        known[key] = len(pieces)
                        pieces.append(model.layers[low:high])
                    kinds[low, high - low] = known[key]
        sort = np.array([index[sort_of(layer)] for layer in model.layers])
        return Chain(model, tuple(sorts), sort, tuple(pieces), block, kinds)

    def pieces_in(self, first: int, last: int) -> Array:
        """Return the blocks and parts of blocks in some consecutive layers."""
        if (first, last) not in self._found:
            self._found[first, last] = np.flatnonzero(self.present(np.array([first]), np.array([last]))[0])
        return self._found[first, last]

    def present(self, first: Array, last: Array) -> Array:
        """Return (range, piece): True if the layers from `first` to `last` contain it."""
        ends = np.minimum(self.block[first, 1], last)  # of the first block, or the part of it
        begins = np.maximum(self.block[last - 1, 0], ends)  # of the last one, behind it
        found = self._whole[begins] > self._whole[ends]
        rows = np.arange(len(first))
        found[rows, self._kinds[first, ends - first]] = True
        tail = np.flatnonzero(begins < last)
        found[tail, self._kinds[begins[tail], (last - begins)[tail]]] = True
        return found

    @cached_property
    def _whole(self) -> Array:
        """(layers + 1, piece): number of whole blocks of each kind that end before each place."""
        one = np.zeros((len(self.sort) + 1, len(self.pieces)), dtype=np.int64)
        for first, last in np.unique(self.block, axis=0).tolist():
            one[last, self._kinds[first, last - first]] = 1
        return np.cumsum(one, axis=0)

    @cached_property
    def counts(self) -> Array:
        """(layers + 1, sorts): number of layers of each kind before each place."""
        one = np.zeros((len(self.sort) + 1, len(self.sorts)))
        one[np.arange(1, len(self.sort) + 1), self.sort] = 1
        return np.cumsum(one, axis=0)

    @cached_property
    def opens(self) -> Array:
        """(layer,): True if it begins a block, or stands outside of any."""
        return np.array([layer.opens_block for layer in self.model.layers])

    def elsewhere(self, held: Sequence[tuple[int, int]]) -> Needs:
        """Return what each range reads or shares from layers outside all: (how, layer, sort that needs it).

        A layer that is read is listed once.
        """
        found = []
        for low, high in held:
            mine: list[tuple[str, int, int]] = []
            read: set[int] = set()
            for i in range(bisect_left(self._needy, low), bisect_left(self._needy, high)):
                for how, source in self._needs[i]:
                    if source in read or any(first <= source < last for first, last in held):
                        continue
                    mine.append((how, source, int(self.sort[self._needy[i]])))
                    read.update([source] if how == "reads" else [])
            found.append(tuple(mine))
        return tuple(found)

    @cached_property
    def every_need(self) -> Needs:
        """Largest needs of a stage."""
        needs = zip(self._needy, self._needs, strict=True)
        return (tuple(sorted({(how, source, int(self.sort[i])) for i, each in needs for how, source in each})),)

    @cached_property
    def tied(self) -> list[int]:
        """Kinds of layers that share weights with another layer."""
        return [i for i, layer in enumerate(self.sorts) if layer.tied_to]

    @cached_property
    def _needy(self) -> list[int]:
        """Layers that read or share what another layer holds."""
        return [i for i, layer in enumerate(self.model.layers) if layer.reads or layer.tied_to]

    @cached_property
    def _needs(self) -> list[list[tuple[str, int]]]:
        """Needs of each of these layers: how, and which layer."""
        index, layers = self.model.index, self.model.layers
        both = [(("reads", layers[i].reads), ("shares", layers[i].tied_to)) for i in self._needy]
        return [[(how, index(name)) for how, name in each if name] for each in both]


@dataclass(frozen=True)
class Prices:
    """Prices as arrays of (mode, sort, choice), or (sort, choice) if the mode does not matter."""

    choices: Choices
    forward: Array  # seconds of one micro-batch
    backward: Array
    weight: Array  # (sort, choice): the part of the backward pass that can be delayed
    kept: Array  # bytes of one micro-batch that stay on the device
    parked: Array  # offloaded bytes of one micro-batch
    moment: Array  # (mode, piece, choice): peak bytes of a block or a part of one
    states: Array  # (sort, choice): bytes on the device with all movable optimizer states offloaded
    host: Array  # bytes on the host, without optimizer states
    movable: Array  # bytes of optimizer states of which any part may be offloaded
    reduce: Array
    gather: Array
    once: Array  # (2, sort, choice): latency of the two
    update: Array  # seconds, no optimizer states offloaded
    update_away: Array  # extra seconds if all movable states are offloaded
    passed_on: Array  # bytes passed to the next layer
    received: Array  # bytes of the input
    buffers: Array  # (choice,): bytes of a gradient of each shape of weight, if the runtime keeps them
    cap: Array  # (choice,): the part of all optimizer states that is movable, if any
    # (4, tied sort, choice): of a copy of weights that another group holds: states, host and movable as above, and
    # elements of communicated gradients
    copies: Array
    relaxed: Relaxed | None = None  # lower bound on the cost of memory

    def take(self, rows: Array) -> Prices:
        """Return the prices of some choices."""
        arrays = {name: getattr(self, name)[..., rows] for name in _ARRAYS}
        return Prices(self.choices.take(rows), relaxed=self.relaxed and self.relaxed.take(rows), **arrays)

    @property
    def columns(self) -> Columns:
        """Columns that bounds need of every choice, without recompute."""
        return self.forward[0], self.backward[0], self.weight, self.passed_on

    def end(self, contention: float) -> Array:
        """Return (sort, choice): seconds at the end of a step, if its communication overlaps."""
        return self.update + contention * (self.reduce + self.gather)

    @property
    def away_rate(self) -> Array:
        """(choice,): least seconds of the update per offloaded byte of optimizer states."""
        return away_rate(self.movable, self.update_away)

    def fixed(self) -> Prices:
        """Return the prices with all movable optimizer states offloaded."""
        none, host = 0 * self.movable, self.host + self.movable
        states, hosted, movable, count = self.copies
        copies = np.stack([states, hosted + movable, 0 * movable, count])
        update = self.update + self.update_away
        return replace(self, host=host, movable=none, copies=copies, update=update, update_away=none)

    def capped(self, most: Array) -> Prices:
        """Return the prices with at most a part of the movable states (per choice) offloaded."""
        return replace(
            self, states=self.states + (1 - most) * self.movable, movable=most * self.movable,
            update_away=most * self.update_away, cap=most * self.cap,
        )  # fmt: skip

    def here(self) -> Prices:
        """Return the prices with all movable states on the device."""
        none, choices = 0 * self.movable, replace(self.choices, optimizer_away=0 * self.choices.optimizer_away)
        states, hosted, movable, count = self.copies
        copies = np.stack([states + movable, hosted, 0 * movable, count])
        held = self.states + self.movable
        return replace(self, choices=choices, states=held, movable=none, copies=copies, update_away=none)

    def under(self, mode: int) -> Prices:
        """Return the prices under one mode."""
        few = {
            name: getattr(self, name)[mode : mode + 1] for name in ("forward", "backward", "kept", "parked", "moment")
        }
        return replace(self, **few)

    def beside(self, other: Prices) -> Prices:
        """Return the prices of the choices of both."""
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(self, name), getattr(other, name)], axis=-1) for name in _ARRAYS
        }
        return Prices(joined([self.choices, other.choices]), **arrays)

    def with_relaxed(self, chain: Chain) -> Prices:
        """Return the prices with the lower bound on the cost of memory."""
        bytes_ = (self.kept, self.parked)
        return replace(self, relaxed=relaxed(chain.counts[-1], self.forward, self.backward, *bytes_, self.away_rate))


def away_rate(movable: Array, update_away: Array) -> Array:
    """Return (choice,): least seconds of the update per offloaded byte of optimizer states, from (sort, choice)."""
    rate = np.where(movable > 0, update_away / np.maximum(movable, 1.0), np.inf).min(axis=0)
    return np.where(np.isinf(rate), 0.0, rate)


_ARRAYS = [field_.name for field_ in fields(Prices) if field_.name not in ("choices", "relaxed")]


def prices(job: Job, chain: Chain, choices: Choices, modes: list[Mode], site: StagePlacement) -> Prices:
    """Price all choices under all modes."""
    configs = priced(choices, job, site.fabric, site.runtime)
    count, sorts = len(choices), len(chain.sorts)
    shape = (len(modes), sorts, count)
    out: dict[str, Array] = {name: np.zeros(shape) for name in ("forward", "backward", "kept", "parked")}
    flat = (
        "weight", "states", "host", "movable", "reduce", "gather", "update", "update_away", "passed_on", "received",
    )  # fmt: skip
    here = replace(configs, offload_optimizer=0 * choices.optimizer_away)
    moves = bool(choices.optimizer_away.any())
    for name in flat:
        out[name] = np.zeros(shape[1:])
    out["once"] = np.zeros((2, *shape[1:]))
    away = np.array([mode.offload for mode in modes])
    once = choices.micro_batch == job.global_batch
    grown: dict[int, Array] = {}  # bytes of gradients in memory of freed activations
    whole: dict[int, Array] = {}
    for i, layer in enumerate(chain.sorts):
        kept = _kept(layer, configs, modes)
        whole[i] = kept[0] if modes[0] == Mode() else np.broadcast_to(layer.kept_bytes(configs.cut), (count,))
        found = _passes(layer, configs, modes, kept, site)
        out["forward"][:, i], out["backward"][:, i], out["weight"][i] = found
        out["kept"][:, i], out["parked"][:, i] = kept * (1 - away[:, None]), kept * away[:, None]
        states = state_bytes(job, [(layer, 1)], configs, site.runtime, once=once)
        grown[i] = once * states.gradients if site.runtime.gradients_grow else 0.0
        out["states"][i] = states.states
        kept_here = state_bytes(job, [(layer, 1)], here, site.runtime, once=once) if moves else states
        out["host"][i], out["movable"][i] = kept_here.host, kept_here.states - states.states
        end = settled([layer], configs, site)
        out["reduce"][i], out["gather"][i] = end.reduce, end.gather
        out["once"][0, i], out["once"][1, i] = end.reduce_once, end.gather_once
        out["update"][i] = update_seconds(job, [layer], here, site)
        if moves:
            out["update_away"][i] = update_seconds(job, [layer], configs, site) - out["update"][i]
        out["passed_on"][i], out["received"][i] = layer.output_bytes(configs.cut), layer.input_bytes(configs.cut)
    out["buffers"], out["cap"] = np.zeros(count), np.ones(count)
    if site.runtime.weight_gradient_buffers:
        shapes = {key: bytes_ for layer in chain.sorts for key, bytes_ in gradient_shapes(layer, configs.cut)}
        out["buffers"] = out["buffers"] + sum(shapes.values())
    out["moment"] = _moments(chain, configs, out, whole, site, once)
    out["copies"] = _copies(job, chain, configs, here, site, once)
    for i, bytes_ in grown.items():
        # A kept byte counts with the allocator's reserve; a gradient's byte does not.
        out["states"][i] -= bytes_
        out["kept"][:, i] = np.maximum(out["kept"][:, i], bytes_ / (1 + loose_share(site.device, site.runtime)))
    return Prices(choices=choices, **out)


def _copies(job: Job, chain: Chain, ways: LayerConfig, here: LayerConfig, site: StagePlacement, once: Array) -> Array:
    """Return the memory of weights shared with a layer elsewhere; `here`: no offloaded optimizer states."""

    def held(layer: Layer, how: LayerConfig, *, tied: bool) -> Bytes:
        return state_bytes(job, [(layer, 1)], how, site.runtime, with_tied=tied, once=once)

    found = np.zeros((4, len(chain.tied), len(ways.zero)))
    for i, layer in enumerate(chain.sorts[sort] for sort in chain.tied):
        more, less = (held(layer, ways, tied=tied) for tied in (True, False))
        all_, own = (held(layer, here, tied=tied) for tied in (True, False))
        both, alone = (layer.parameters_on(ways.cut, with_tied=tied) for tied in (True, False))
        states = more.states - less.states
        found[:, i] = np.broadcast_arrays(states, all_.host - own.host, all_.states - own.states - states, both - alone)
    return found


def _kept(layer: Layer, ways: LayerConfig, modes: list[Mode]) -> Array:
    """Return (mode, choice): bytes left after recompute, on the device or offloaded."""
    count = len(ways.zero)
    tensors = layer.kept_tensors(ways.cut)
    rows = []
    for mode in modes:
        if mode.recompute == "full":
            rows.append(layer.kept_bytes(ways.cut, "full"))
        else:
            stay = layer.still_kept(mode.recompute, fused_attention=ways.cut.fused_attention)
            rows.append(sum((tensors[i] for i in stay), 0.0))
    return np.stack([np.broadcast_to(row, (count,)) for row in rows])


def _passes(
    layer: Layer, ways: LayerConfig, modes: list[Mode], kept: Array, site: StagePlacement
) -> tuple[Array, Array, Array]:
    """Return seconds forward and backward by mode, and the weight gradient's part."""
    repeats = recomputes(modes)
    time = layer_times(layer, ways.cut, site.chip, site.fabric, site.runtime, ways.place, repeats)
    shape = (len(modes), len(ways.zero))
    forward, backward = np.zeros(shape), np.zeros(shape)
    for away in sorted({mode.offload for mode in modes}):
        rows = [i for i, mode in enumerate(modes) if mode.offload == away]
        pick = [repeats.index(modes[i].recompute) for i in rows]
        part = replace(
            time,
            work=replace(time.work, recompute=time.work.recompute[pick]),
            transfers={axis: replace(t, repeated=t.repeated[pick]) for axis, t in time.transfers.items()},
        )
        found = layer_passes(layer, part, replace(ways, offload_activations=away), site, kept[rows])
        forward[rows], backward[rows] = (found.total(when) for when in PASSES)
    return forward, backward, np.broadcast_to(time.work.weight_gradient, shape[1:])


def _moments(
    chain: Chain, ways: LayerConfig, out: dict[str, Array], whole: dict[int, Array], site: StagePlacement, once: Array
) -> Array:
    """Return the peak of each piece under each mode."""
    index = {sort_of(layer): i for i, layer in enumerate(chain.sorts)}
    found = []
    for block in chain.pieces:
        rows = [index[sort_of(layer)] for layer in block]
        again = sum(whole[i] - out["kept"][:, i] for i in rows)
        base = gradient_bytes(list(block), ways.cut, site.runtime, once=once) + gathered_bytes(
            list(block), ways, gloo=is_processor(site.device)
        )
        found.append(np.maximum(again, 0.0) + base)
    return np.stack(found, axis=1)


class Priced:
    """Choices priced under every mode on first use."""

    def __init__(self, everything: Choices, chain: Chain, price: Callable[[Choices], Prices]) -> None:
        self.everything, self.chain, self.price = everything, chain, price
        self.place = np.full(len(everything), -1, dtype=np.int64)
        self.table: Prices | None = None
        self._lean: Prices | None = None

    def take(self, rows: Array) -> Prices:
        """Return the prices of some choices."""
        self.price_all(rows)
        assert self.table is not None
        return self.table.take(self.place[rows])

    def lean(self, rows: Array) -> Prices:
        """Return prices for bounds: under the first mode only, with the lower bound on memory over all modes."""
        every, places = self.lean_rows(rows)
        return every.take(places)

    def lean_rows(self, rows: Array) -> tuple[Prices, Array]:
        """Return these prices among all priced so far, and the positions of `rows`."""
        self.price_all(rows)
        assert self._lean is not None
        return self._lean, self.place[rows]

    def price_all(self, rows: Array) -> None:
        """Price those that have no price yet."""
        new = rows[self.place[rows] < 0]
        if not len(new):
            return
        more = self.price(self.everything.take(new))
        known = 0 if self.table is None else len(self.table.choices)
        self.place[new] = known + np.arange(len(new))
        self.table = (more if self.table is None else self.table.beside(more)).with_relaxed(self.chain)
        self._lean = replace(self.table.under(0), moment=self.table.moment.min(axis=0, keepdims=True))
