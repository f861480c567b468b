"""Bytes of short-lived tensors: gathered weights, recomputed activations, gradients in communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import Any

import numpy as np

from meshwright.cost.layers.layer_config import LayerConfig
from meshwright.cost.runtime import Runtime
from meshwright.models import Layer, Slice, precision
from meshwright.models.layer import Recompute
from meshwright.plans import Job, Span
from meshwright.plans.spans import alike, layers_of, sort_of

# Tokens per chunk of a chunked loss, in the runtime and in the count of its memory.


# The weight's gradient is rounded once per chunk where it accumulates: few chunks, each large enough for the matrix
# units.
CHUNKS, LEAST = 8, 4096


def loss_chunk(rows: Any) -> Any:
    """Return the tokens of a chunk: an eighth of them, and 4,096 at least.

    >>> [int(loss_chunk(rows)) for rows in (100, 8192, 131072)]
    [4096, 4096, 16384]
    """
    return np.maximum(LEAST, -(-rows // CHUNKS))


Array = Any


@dataclass(frozen=True)
class Transient:
    """Largest extra memory of a device, beside its states and the activations in flight."""

    working: Array = 0.0  # recomputed activations, gradients of activations, temporaries of the loss
    communication: Array = 0.0  # gathered weights and inputs, gradients before they are sharded

    @property
    def total(self) -> Array:
        return self.working + self.communication

    def fuller(self, other: Transient) -> Transient:
        """Return the larger of two peaks."""
        return self if self.total >= other.total else other


def transient(
    job: Job, span: Span, samples: int, runtime: Runtime, *, once: bool = False, gloo: bool = False
) -> Transient:
    """Return the peak of a span: the block whose backward pass needs most.

    `once`: a step is one micro-batch; `gloo`: CPUs sum the gradients.
    """
    most, seen = Transient(), set()
    config = LayerConfig.anywhere(span, samples, job, runtime)
    for _, layers in groupby(layers_of(job.model, span.layers), key=lambda layer: layer.block or layer.name):
        block = list(layers)
        sort = tuple(map(sort_of, block))
        if sort in seen:
            continue
        seen.add(sort)
        most = most.fuller(moment(block, config, span.recompute, runtime, once=once, gloo=gloo))
    return most


def moment(
    block: list[Layer],
    ways: LayerConfig,
    recompute: Recompute,
    runtime: Runtime,
    *,
    once: Array = False,
    gloo: bool = False,
) -> Transient:
    """Return the peak of one block, or of a part of it."""
    cut = ways.cut
    again = sum(layer.kept_bytes(cut, "none") - ways.here * layer.kept_bytes(cut, recompute) for layer in block)
    working = np.maximum(again, 0.0) + gradient_bytes(block, cut, runtime, once=once)
    return Transient(working, gathered_bytes(block, ways, gloo=gloo))


def gradient_bytes(block: list[Layer], cut: Slice, runtime: Runtime, *, once: Array = False) -> Array:
    """Return the gradient bytes of the widest product of a block, without the recomputed activations."""
    return reduce(np.maximum, (_gradients(layer, cut, runtime, once) for layer in block))


def _gradients(layer: Layer, cut: Slice, runtime: Runtime, once: Array) -> Array:
    """Return the gradient bytes of a layer's widest product, input and output; of a head, those of the logits."""
    size, length = precision(cut.precision).activation, layer.length(cut.seq_len)
    if layer.kind == "head":
        logits = sum(op.moves for op in layer.ops if op.kind == "loss")
        if runtime.loss_in_chunks:  # logits of a chunk, and the weight's gradient before it is accumulated
            rows = cut.tokens("whole", length)
            some = np.minimum(rows, loss_chunk(rows)) * logits / cut.tp
            return _beside_logits(size * some, layer, cut, runtime, once)
        # The model counts four bytes of every logit among the activations.
        return max(runtime.loss_memory - 4.0, 0.0) * logits * cut.tokens("tensor", length)
    widest: Array = 0.0
    for op in layer.ops:
        if op.kind == "matmul":
            rows = cut.tokens("whole" if op.cut in {"column", "row"} else op.scope, length) * op.rows
            n, k = (op.n / cut.tp, op.k) if op.cut == "column" else (op.n, op.k / cut.tp if op.cut == "row" else op.k)
            # The gradients of a gate and its input are made together, while the gradient of their product still exists.
            gated = 2 * k if op.name == "down" and "gate" in layer.op_names else 0.0
            widest = np.maximum(widest, size * rows * np.maximum(n + k, gated))
    return widest


def _beside_logits(logits: Array, layer: Layer, cut: Slice, runtime: Runtime, once: Array) -> Array:
    """Return the bytes of a chunk's logits and the weight's gradient.

    The gradient is the sum of one micro-batch, in the type of the weight. Once the logits are freed, it becomes the
    gradient itself, or is cast and added to the others'.
    """
    p, weights = precision(cut.precision), layer.parameters_on(cut, with_tied=True)
    own = np.where(np.asarray(once) & runtime.narrow_gradients, 0.0, p.parameter * weights)
    cast = np.where(np.asarray(once) | (not runtime.narrow_gradients), 0.0, p.gradient * weights)
    return np.maximum(logits, cast) + own


def gathered_bytes(block: list[Layer], ways: LayerConfig, *, gloo: bool = False) -> Array:
    """Return the bytes of fetched weights, unsharded gradients and gathered inputs.

    Weights are the running block's and the next one's; gradients are whole before they are sharded; sequence
    parallelism gathers the input. On CPUs `fully_shard` copies the gradients of a block into one buffer, and gloo sums
    a copy of that; the next block's weights are not there yet.
    """
    cut, zero = ways.cut, np.asarray(ways.zero)
    p = precision(cut.precision)
    experts = sum(layer.expert_parameters_on(cut) for layer in block)
    dense = sum(layer.parameters_on(cut, with_tied=True) for layer in block) - experts
    total: Array = 0.0
    for count, replicas in ((dense, ways.dense), (experts, ways.experts)):
        sharded = np.asarray(replicas.shards) > 1
        fetched = (np.asarray(ways.offload_parameters) > 0) | ((zero == 3) & sharded)
        blocks = np.where(gloo & (zero == 3) & sharded, 1, 2)
        buffers = 2 * (zero >= 1) if gloo else zero >= 2
        total = total + fetched * blocks * count * p.parameter + buffers * sharded * count * p.gradient
    gathered = reduce(np.maximum, (layer.input_bytes(cut) for layer in block)) * cut.tp
    return total + (np.asarray(cut.sp, dtype=bool) & (np.asarray(cut.tp) > 1)) * gathered


def weight_gradient_buffers(job: Job, spans: list[Span], cuts: list[Slice], runtime: Runtime) -> float:
    """Return the bytes of one buffer per shape of weight.

    The runtime accumulates gradients elsewhere but must return something to autograd (Transformer Engine with fused
    gradient accumulation).
    """
    if not runtime.weight_gradient_buffers:
        return 0.0
    shapes: dict[tuple[object, ...], float] = {}
    for span, cut in zip(spans, cuts, strict=True):
        for layer, _ in alike(layers_of(job.model, span.layers)):
            shapes |= {(*key, cut.tp): float(bytes_) for key, bytes_ in gradient_shapes(layer, cut)}
    return sum(shapes.values())


def gradient_shapes(layer: Layer, cut: Slice) -> Iterator[tuple[tuple[object, ...], Array]]:
    """Yield the shapes of a layer's weights, with the bytes of a gradient of each."""
    size = precision(cut.precision).parameter
    for op in layer.ops:
        if op.kind == "matmul" and layer.kind != "head":
            one = 1
            if op.cut == "expert":
                one = np.maximum(reduce(np.maximum, (w.experts // cut.ep for w in op.weights)), 1)  # of its experts
            # Gate and up are one weight in these runtimes.
            yield (op.k, op.n, op.cut, op.shares_input), size * sum(w.on_device(cut) for w in op.weights) / one
