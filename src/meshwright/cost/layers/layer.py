"""Time of one layer under one strategy, or under thousands at once.

Computation is a sum over operators; communication is listed by the axis that causes it. Degrees in the `Slice` may be
numpy arrays, with one entry for each candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshwright.cost.layers.collectives import Fabric, exchange_seconds, gather_seconds, reduce_seconds, ring_seconds
from meshwright.cost.layers.operators import Chip, attention_seconds, memory_seconds, product_seconds
from meshwright.cost.runtime import Runtime
from meshwright.models import Layer, Slice
from meshwright.models.layer import Op, Recompute
from meshwright.models.precision import precision

Array = Any
# Bytes moved per score of unfused attention, without its two products: scale-mask-softmax, dropout and its mask.
_SCORE_BYTES = (8.0, 11.0)  # forward, backward
_KERNELS = {"router": 10, "dispatch": 12, "combine": 6}  # besides the main one
_BACKWARD_MOVES = 1.5  # a memory-bound operator reads its input and the gradient, and writes a gradient


@dataclass(frozen=True)
class Work:
    """Seconds of computation of one layer on a device, by pass, and its number of kernels."""

    forward: Array = 0.0
    input_gradient: Array = 0.0  # the part of the backward pass that the layer before waits for
    weight_gradient: Array = 0.0
    recompute: Array = 0.0  # part of the forward pass that the backward pass recomputes
    kernels: Array = 0.0  # of the forward pass

    def __add__(self, other: Work) -> Work:
        return Work(
            self.forward + other.forward, self.input_gradient + other.input_gradient,
            self.weight_gradient + other.weight_gradient, self.recompute + other.recompute, self.kernels + other.kernels,
        )  # fmt: skip


@dataclass(frozen=True)
class Transfer:
    """Seconds of communication along one axis, forward and backward, and the exposed part."""

    forward: Array = 0.0
    backward: Array = 0.0
    forward_exposed: Array = 0.0
    backward_exposed: Array = 0.0
    repeated: Array = 0.0  # exposed again when the forward pass is recomputed


@dataclass(frozen=True)
class Placement:
    """Distance between members of each axis, in devices (1 = adjacent), or the number that each tier joins."""

    tp: Array = 1
    ulysses: Array = 1
    ring: Array = 1
    ep: Array = 1


@dataclass(frozen=True)
class LayerTime:
    """Time of one layer, for one micro-batch on one device."""

    work: Work
    transfers: dict[str, Transfer] = field(default_factory=dict)

    @property
    def forward(self) -> Array:
        return self.work.forward + sum(t.forward_exposed for t in self.transfers.values())

    @property
    def backward(self) -> Array:
        work = self.work.input_gradient + self.work.weight_gradient + self.work.recompute
        return work + sum(t.backward_exposed + t.repeated for t in self.transfers.values())


def layer_time(
    layer: Layer, cut: Slice, chip: Chip, fabric: Fabric, runtime: Runtime, place: Placement,
    recompute: Recompute = "none",
) -> LayerTime:  # fmt: skip
    """Return the computation and communication of one layer for one micro-batch on one device."""
    many = layer_times(layer, cut, chip, fabric, runtime, place, [recompute])
    work = replace(many.work, recompute=many.work.recompute[0])
    return LayerTime(work, {axis: replace(t, repeated=t.repeated[0]) for axis, t in many.transfers.items()})


def layer_times(
    layer: Layer, cut: Slice, chip: Chip, fabric: Fabric, runtime: Runtime, place: Placement,
    recomputes: Sequence[Recompute],
) -> LayerTime:  # fmt: skip
    """Return the layer's time under several recompute choices.

    `recompute` and `repeated` of the result have the choices as their first axis.
    """
    length = layer.length(cut.seq_len)
    works = [_op_work(op, layer, cut, length, chip, runtime) for op in layer.ops]
    again = [repeated_ops(layer, recompute, runtime) for recompute in recomputes]
    total = sum(works, Work())
    repeated = [
        sum((w.forward for op, w in zip(layer.ops, works, strict=True) if _repeats(op, names, layer, r)), 0.0)
        for names, r in zip(again, recomputes, strict=True)
    ]
    total = replace(total, recompute=np.stack([np.broadcast_to(r, np.shape(total.forward)) for r in repeated]))
    cuts = [op for op in layer.ops if op.cut in {"column", "row"} or op.kind == "dispatch"]
    transfers = {
        "tp": _tensor_parallel(layer, cut, length, fabric, runtime, place, total),
        "ring": _ring(layer, cut, length, chip, fabric, runtime, place),
        "ulysses": _ulysses(layer, cut, length, fabric, place),
        "ep": _experts(layer, cut, length, fabric, runtime, place),
    }
    # Recomputed operators gather their inputs again.
    fetched = np.array([sum(op.name in names for op in cuts) / max(len(cuts), 1) for names in again])
    found = {axis: _settled(t, chip, fetched) for axis, t in transfers.items() if t is not None}
    collectives = sum(runtime.collective_kernels * (np.asarray(getattr(cut, axis)) > 1) for axis in found)
    return LayerTime(total + Work(kernels=collectives), found)  # the host issues collectives too


def _repeats(op: Op, names: frozenset[str], layer: Layer, recompute: Recompute) -> bool:
    return op.name in names or (op.kind == "stream" and recompute == "full" and bool(layer.block))


def operator_seconds(layer: Layer, cut: Slice, chip: Chip, runtime: Runtime) -> dict[str, float]:
    """Return the seconds of each operator's forward pass, which is its cost of recompute."""
    length = layer.length(cut.seq_len)
    return {op.name: float(_op_work(op, layer, cut, length, chip, runtime).forward) for op in layer.ops}


def repeated_ops(layer: Layer, recompute: Recompute, runtime: Runtime) -> frozenset[str]:
    """Return the operators that the backward pass recomputes; frameworks recompute only those of blocks."""
    if recompute == "full" and not layer.block:
        return frozenset()
    names = layer.recomputed_ops(recompute, fused_attention=runtime.fused_attention)
    if recompute == "full" and runtime.stops_early and [op.name for op in layer.ops[-2:]] == ["down", "residual"]:
        names -= {"down"}  # no backward pass needs the output of a block's last product
    return names


def _settled(t: Transfer, chip: Chip, repeats: Array) -> Transfer:
    """Add the costs of overlap and recompute.

    Overlapped communication slows computation; recomputed passes communicate again.
    """
    slow = chip.constants.contention
    forward = t.forward_exposed + slow * (t.forward - t.forward_exposed)
    backward = t.backward_exposed + slow * (t.backward - t.backward_exposed)
    return Transfer(t.forward, t.backward, forward, backward, np.multiply.outer(repeats, forward))


def _op_work(op: Op, layer: Layer, cut: Slice, length: int, chip: Chip, runtime: Runtime) -> Work:
    if op.kind == "matmul":
        return _product(op, cut, length, chip, runtime)
    if op.kind == "attention":
        return _attention(op, layer, cut, length, chip, runtime)
    if op.kind == "traced":
        return _traced(op, cut, length, chip)
    if not op.moves:
        return Work()
    return _memory_bound(op, cut, length, chip, runtime)


def _product(op: Op, cut: Slice, length: int, chip: Chip, runtime: Runtime) -> Work:
    """Return forward x W, then the gradients of x and of W: three products of equal FLOPs in different shapes."""
    m = cut.tokens(op.scope, length) * op.rows
    k: Array = op.k
    n: Array = op.n
    groups: Array = 1
    if op.cut == "expert":
        experts = op.weights[0].experts
        groups = np.maximum(experts / cut.ep, 1)
        m = cut.tokens("routed", length) * op.rows / groups
        k, n = (op.k / cut.etp, op.n) if op.name.endswith("down") else (op.k, op.n / cut.etp)
    elif op.cut == "column":
        m, n = cut.tokens("whole", length), op.n / cut.tp * op.padding(cut)
    elif op.cut == "row":
        m, k = cut.tokens("whole", length), op.k / cut.tp * op.padding(cut)
    low = chip.low and op.name not in {"logits", "router", "shared_gate"}
    size = precision(cut.precision).activation
    added = max(runtime.accumulate_bytes, size)
    forward = product_seconds(chip, m, k, n, low=low, groups=groups, size=size)
    by_input = product_seconds(chip, m, n, k, low=low, groups=groups, size=size)
    # Weight gradients accumulate over micro-batches.
    by_weight = product_seconds(chip, k, m, n, low=low, groups=groups, size=size, added_to=added)
    if low:  # operands are read in 16 bits and written in 8, once as they are and once transposed
        forward = forward + (0.0 if op.shares_input else memory_seconds(chip, 4.0 * m * k * groups))
        by_input = by_input + memory_seconds(chip, 4.0 * m * n * groups)
    # A grouped product is issued per expert; scores, top-k and balance follow a router.
    issued = groups + _KERNELS.get(op.name, 0)
    return Work(forward, by_input, by_weight, kernels=issued + low)


def _attention(op: Op, layer: Layer, cut: Slice, length: int, chip: Chip, runtime: Runtime) -> Work:
    flops = op.forward_flops(cut, length)
    if op.pairs == "causal" and not runtime.balanced_ring:
        flops = flops * (2 * cut.ring - 1) / cut.ring  # the last device meets every key, and all wait for it
    heads = max(layer.heads, 1)
    head_dim = max(sum(kept.per_token for kept in op.keeps if kept.name == "context") / heads, 1.0)
    if runtime.attention == "unfused":
        # The masked half counts too. Windows of a picture are separate products, sliding ones are masked.
        keys = length if op.pairs != "none" else op.flops_per_token / (4 * heads * head_dim)
        here = float(length) * keys * heads * cut.micro_batch / (cut.tp * cut.ulysses * cut.ring)
        batch = cut.micro_batch * heads / (cut.tp * cut.ulysses) * length / keys
        one = product_seconds(chip, keys / cut.ring, head_dim, keys, low=False, groups=batch)
        size = precision(cut.precision).activation / 2
        forward = 2 * one + memory_seconds(chip, _SCORE_BYTES[0] * size * here)
        return Work(forward, 4 * one + memory_seconds(chip, _SCORE_BYTES[1] * size * here), kernels=5)
    # Keys per query; the windows of a picture state their FLOPs per token instead of per pair.
    seen = min(op.window or length, length) if op.pairs != "none" else op.flops_per_token / (4 * heads * head_dim)
    rows = cut.tokens("tensor", length) * heads
    forward = attention_seconds(chip, flops, seen, rows, head_dim, backward=False)
    return Work(forward, attention_seconds(chip, flops, seen, rows, head_dim, backward=True), kernels=1)


def _memory_bound(op: Op, cut: Slice, length: int, chip: Chip, runtime: Runtime) -> Work:
    size = precision(cut.precision).activation
    tokens = cut.tokens(op.scope, length)
    if op.kind == "loss":
        # Forward and backward together read or write the logits several times, mostly in float32.
        moved = runtime.loss_bytes * op.moves * cut.tokens("whole", length) / cut.tp
        seconds = memory_seconds(chip, moved)
        return Work(seconds / 2, seconds / 2, kernels=6)
    passes = {
        "norm": runtime.norm_passes,
        "elementwise": runtime.activation_passes,
        "dispatch": runtime.dispatch_passes,
        "combine": runtime.dispatch_passes,
    }.get(op.kind, runtime.stream_passes)
    moved = size * op.moves * passes * tokens
    norm = op.kind == "norm"
    kernels = 1 + (passes > 1) * 3 + _KERNELS.get(op.kind, 0)
    forward = memory_seconds(chip, moved, norm=norm)
    return Work(forward, memory_seconds(chip, _BACKWARD_MOVES * moved, norm=norm), kernels=kernels)


def _traced(op: Op, cut: Slice, length: int, chip: Chip) -> Work:
    """Return the work of a module known only by FLOPs and kept bytes.

    Its products run at the sustained rate; its tensors are written and read.
    """
    kept = sum(k.bytes(cut, length) for k in op.keeps)
    compute = op.forward_flops(cut, length) / chip.product_16
    moved = memory_seconds(chip, 2 * kept)
    return Work(compute + moved, compute + 1.5 * moved, compute, kernels=8)


def _tensor_parallel(
    layer: Layer, cut: Slice, length: int, fabric: Fabric, runtime: Runtime, place: Placement, work: Work
) -> Transfer | None:
    """Return the all-gathers before column-cut products and the sums after row-cut ones (Shoeybi et al., 2019).

    Without sequence parallelism each pass needs one all-reduce. With it, the same bytes take an all-gather and a
    reduce-scatter. The backward pass then adds an all-gather of the input for the weight gradient (Korthikanti et al.,
    2022).
    """
    cuts = {op.cut for op in layer.ops}
    columns, rows = "column" in cuts, "row" in cuts or layer.kind == "embedding"
    if np.all(cut.tp == 1) or not (columns or rows):
        return None
    width = layer.width_out if layer.kind == "embedding" else layer.width_in
    moved = precision(cut.precision).activation * width * cut.tokens("whole", length)
    gather = gather_seconds(fabric, moved, cut.tp, place.tp)
    reduce = reduce_seconds(fabric, moved, cut.tp, place.tp)
    sp, on = np.asarray(cut.sp), np.asarray(cut.tp) > 1
    forward = on * np.where(sp, (columns + rows) * gather, rows * reduce)
    backward = on * np.where(sp, (2 * columns + rows) * gather, columns * reduce)
    blocking = backward
    if runtime.tp_backward_overlap:
        # The input's all-gather overlaps with its gradient, the gradient's reduction with the weight gradients.
        first = np.where(sp, rows * gather, 0.0) * on
        blocking = backward - np.minimum(backward - first, work.input_gradient + work.weight_gradient)
    return Transfer(forward, backward, forward * (1 - runtime.tp_overlap), blocking * (1 - runtime.tp_overlap))


def _ring(
    layer: Layer, cut: Slice, length: int, chip: Chip, fabric: Fabric, runtime: Runtime, place: Placement
) -> Transfer | None:
    """Return ring communication: keys and values move while attention runs, their gradients move back with them."""
    if np.all(cut.ring == 1) or layer.kind not in {"attention", "cross_attention"}:
        return None
    step = ring_seconds(fabric, _kept(layer, cut, length, "k", "v"), cut.ring, place.ring)
    core = [_op_work(op, layer, cut, length, chip, runtime) for op in layer.ops if op.kind == "attention"]
    forward = (cut.ring - 1) * step
    under = (cut.ring - 1) / cut.ring  # the first piece is local
    exposed = np.maximum(forward - sum(work.forward for work in core) * under, 0)
    behind = np.maximum(2 * forward - sum(work.input_gradient for work in core) * under, 0)
    return Transfer(forward, 2 * forward, exposed, behind)


def _kept(layer: Layer, cut: Slice, length: int, *names: str) -> Array:
    """Return the bytes of some tensors of a layer on one device, with heads that tensor parallelism replicates."""
    tensors = {kept.name: kept for op in layer.ops for kept in op.keeps}
    return sum(tensors[name].bytes(cut, length) for name in names if name in tensors)


def _ulysses(layer: Layer, cut: Slice, length: int, fabric: Fabric, place: Placement) -> Transfer | None:
    """Return the all-to-alls of Ulysses: queries, keys, values from sequence cut to head cut, the context back."""
    if np.all(cut.ulysses == 1) or layer.kind not in {"attention", "cross_attention"}:
        return None
    there, back = _kept(layer, cut, length, "q", "k", "v"), _kept(layer, cut, length, "context")
    both = sum(exchange_seconds(fabric, moved, cut.ulysses, place.ulysses) for moved in (there, back))
    seconds = both * (np.asarray(cut.ulysses) > 1)
    return Transfer(seconds, seconds, seconds, seconds)


def _experts(
    layer: Layer, cut: Slice, length: int, fabric: Fabric, runtime: Runtime, place: Placement
) -> Transfer | None:
    """Return two all-to-alls per pass: tokens go to their experts and back, and so do their gradients.

    Devices that share an expert (etp) gather its tokens and scatter its results. Tensor parallelism without sequence
    parallelism splits a layer's tokens over its devices, and gathers them at the end.
    """
    if not layer.experts or np.all((cut.ep == 1) & (cut.etp == 1) & (cut.tp == 1)):
        return None
    sent = layer.dispatch_bytes(cut)
    copies = layer.top_k if runtime.one_copy_per_node else 0
    seconds = 2 * exchange_seconds(fabric, sent, cut.ep, place.ep, copies=copies) * (np.asarray(cut.ep) > 1)
    shared = 2 * gather_seconds(fabric, sent * cut.etp, cut.etp, 1) * (np.asarray(cut.etp) > 1)
    whole = precision(cut.precision).activation * layer.width_out * cut.tokens("whole", length)
    dealt = gather_seconds(fabric, whole, cut.tp, place.tp) * (
        (np.asarray(cut.tp) > 1) & ~np.asarray(cut.sp, dtype=bool)
    )
    exposed = seconds * (1 - runtime.overlap_experts) + shared + dealt
    whole_time = seconds + shared + dealt
    return Transfer(whole_time, whole_time, exposed, exposed)
