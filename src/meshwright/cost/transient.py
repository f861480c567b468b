"""Bytes that live only while something runs: gathered weights, recomputed activations, gradients on their way."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from meshwright.cost.runtime import Runtime
from meshwright.model import Layer, Slice, precision
from meshwright.plan import Job, Span
from meshwright.plan.spans import alike, layers_of, sort_of


@dataclass(frozen=True)
class Transient:
    """The most a device needs beside its states and the activations in flight."""

    working: float = 0.0  # recomputed activations, gradients of activations, temporaries of the loss
    communication: float = 0.0  # gathered weights and inputs, gradients before they are sharded

    def fuller(self, other: Transient) -> Transient:
        """The larger of two moments."""
        return self if self.working + self.communication >= other.working + other.communication else other


def transient(job: Job, span: Span, cut: Slice, runtime: Runtime) -> Transient:
    """The fullest moment of a span: the block whose backward pass needs most."""
    most, seen = Transient(), set()
    for _, layers in groupby(layers_of(job.model, span.layers), key=lambda layer: layer.block or layer.name):
        block = list(layers)
        sort = tuple(map(sort_of, block))
        if sort in seen:
            continue
        seen.add(sort)
        most = most.fuller(Transient(_working(block, span, cut, runtime), _communication(block, job, span, cut)))
    return most


def _working(block: list[Layer], span: Span, cut: Slice, runtime: Runtime) -> float:
    """Activations that were dropped or moved away come back; gradients of the widest product stand beside them."""
    again = sum(
        float(layer.kept_bytes(cut, "none") - span.activations_here * layer.kept_bytes(cut, span.recompute))
        for layer in block
    )
    return max(again, 0.0) + max(_gradients(layer, cut, runtime) for layer in block)


def _gradients(layer: Layer, cut: Slice, runtime: Runtime) -> float:
    """Gradients of the output and the input of a layer's widest product; of a head, what the loss makes of the logits."""
    size, length = precision(cut.precision).activation, layer.length(cut.seq_len)
    if layer.kind == "head":
        logits = sum(op.moves for op in layer.ops if op.kind == "loss")
        # The model counts four bytes of every logit among the activations.
        return max(runtime.loss_memory - 4.0, 0.0) * logits * float(cut.tokens("tensor", length))
    widest = 0.0
    for op in layer.ops:
        if op.kind == "matmul":
            rows = float(cut.tokens("whole" if op.cut in {"column", "row"} else op.scope, length)) * op.rows
            n, k = (op.n / cut.tp, op.k) if op.cut == "column" else (op.n, op.k / cut.tp if op.cut == "row" else op.k)
            widest = max(widest, size * rows * (n + k))
    return widest


def _communication(block: list[Layer], job: Job, span: Span, cut: Slice) -> float:
    """Weights fetched from elsewhere (the running block's and the next one's), whole gradients before they are
    sharded, and the input that sequence parallelism gathers."""
    p = precision(job.precision)
    experts = sum(layer.expert_parameters_on(cut) for layer in block)
    dense = sum(layer.parameters_on(cut, with_tied=True) for layer in block) - experts
    total = 0.0
    for count, replicas in ((dense, span.replicas), (experts, span.expert_replicas)):
        sharded = span.shards(replicas) > 1
        if span.offload.parameters or (span.zero == 3 and sharded):
            total += 2 * count * p.parameter
        if span.zero >= 2 and sharded:
            total += count * p.gradient
    if span.sp and span.tp > 1:
        total += max(float(layer.input_bytes(cut)) * span.tp for layer in block)
    return total


def weight_gradient_buffers(job: Job, spans: list[Span], cuts: list[Slice], runtime: Runtime) -> float:
    """One buffer per shape of weight, where the runtime adds gradients up elsewhere but must hand autograd something
    (Transformer Engine with fused gradient accumulation)."""
    if not runtime.weight_gradient_buffers:
        return 0.0
    shapes: dict[tuple[object, ...], float] = {}
    size = precision(job.precision).parameter
    for span, cut in zip(spans, cuts, strict=True):
        for layer, _ in alike(layers_of(job.model, span.layers)):
            for op in layer.ops:
                if op.kind == "matmul" and layer.kind != "head":
                    one = max(w.experts // cut.ep for w in op.weights) if op.cut == "expert" else 1  # of its experts
                    bytes_ = size * float(sum(w.on_device(cut) for w in op.weights)) / max(one, 1)
                    # Gate and up are one weight in these runtimes.
                    shapes[(op.k, op.n, op.cut, cut.tp, op.shares_input)] = bytes_
    return sum(shapes.values())
