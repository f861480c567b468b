"""Bytes that operators with little computation must move: each input read once, each output written once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from math import prod

from meshwright.traces.rank.operators.inputs import Call, Cost


def _pointwise(call: Call) -> Cost:
    """Return the cost of a pointwise operator: its output has the broadcast shape and the largest input's type."""
    places = call.tensors()
    largest = max(places, key=lambda place: prod(call.shape(place)))
    return call.cost(0, call.bytes(*places) + _broadcast(call, places) * call.width(largest), largest)


def _compared(call: Call) -> Cost:
    """Return the cost of a comparison, whose output is one byte per element."""
    places = call.tensors()
    return call.cost(0, call.bytes(*places) + _broadcast(call, places), places[0])


def _broadcast(call: Call, places: list[int]) -> int:
    """Return the number of elements of the shape that some inputs broadcast to."""
    shapes = [reversed(call.shape(place)) for place in places]
    return prod(max(sizes) for sizes in zip_longest(*shapes, fillvalue=1))


def _copy(call: Call) -> Cost:
    """Return the cost of a copy (to, from): the target is not read."""
    source = prod(call.shape(0)) * call.width(1) if prod(call.shape(1)) > 1 else call.width(1)
    return call.cost(0, call.bytes(0) + min(source, call.bytes(1)))


def _fill(call: Call) -> Cost:
    call.shape(0)
    return call.cost(0, call.bytes(0))


def _reduced(call: Call) -> Cost:
    """Return the cost of a reduction; its output is unknown and taken as small."""
    call.shape(0)
    return call.cost(0, call.bytes(0))


def _rewritten(*read: int, written: tuple[int, ...] = (0,)) -> Callable[[Call], Cost]:
    """Return a cost function: some inputs are read, and as much as some of them is written."""

    def rule(call: Call) -> Cost:
        call.shape(written[0])
        return call.cost(0, call.bytes(*read) + call.bytes(*written), written[0])

    return rule


def _dropout(call: Call) -> Cost:
    """Return the cost of dropout: a value and a mask byte per element."""
    return call.cost(0, 2 * call.bytes(0) + prod(call.shape(0)))


def _gathered(table: int, indices: int) -> Callable[[Call], Cost]:
    """Return a cost function for rows of a table: each index, the row that it names, and the row that is written."""

    def rule(call: Call) -> Cost:
        rows = prod(call.shape(indices)) * prod(call.shape(table)[1:])
        return call.cost(0, call.bytes(indices) + 2 * rows * call.width(table), table)

    return rule


def _scattered(call: Call) -> Cost:
    """Return the cost of (gradient, indices, rows of the table, ...): the table's whole gradient is written."""
    rows = call.numbers(2)[0]
    return call.cost(0, call.bytes(0, 1) + rows * call.shape(0)[-1] * call.width(0))


POINTWISE = """
add sub rsub mul div neg exp log abs sqrt rsqrt reciprocal pow square sin cos tanh sigmoid relu gelu silu mish elu
leaky_relu softplus hardtanh clamp clamp_min clamp_max where lerp addcmul addcdiv masked_fill maximum minimum
threshold_backward gelu_backward silu_backward tanh_backward sigmoid_backward leaky_relu_backward hardtanh_backward
elu_backward softplus_backward native_dropout_backward erf floor round sign bitwise_and bitwise_or bitwise_not logical_and
logical_or logical_not
"""
COMPARED = "eq ne lt le gt ge isnan isinf isfinite"
MOVES: dict[str, Callable[[Call], Cost]] = {
    **{f"aten::{name}{ending}": _pointwise for name in POINTWISE.split() for ending in ("", "_")},
    **{f"aten::{name}": _compared for name in COMPARED.split()},
    "aten::copy_": _copy,
    "aten::fill_": _fill,
    "aten::zero_": _fill,
    "aten::sum": _reduced,
    "aten::mean": _reduced,
    "aten::linalg_vector_norm": _reduced,
    "aten::amax": _reduced,
    "aten::native_dropout": _dropout,
    "aten::_softmax": _rewritten(0),
    "aten::_log_softmax": _rewritten(0),
    "aten::_softmax_backward_data": _rewritten(0, 1),
    "aten::_log_softmax_backward_data": _rewritten(0, 1),
    "aten::native_layer_norm": _rewritten(0, 2, 3),
    "aten::native_layer_norm_backward": _rewritten(0, 1, 3, 4, 5, written=(1, 5, 6)),
    "aten::_fused_rms_norm": _rewritten(0, 2),
    "aten::_fused_rms_norm_backward": _rewritten(0, 1, 3, 4, written=(1, 4)),
    "aten::native_group_norm": _rewritten(0, 1, 2),
    "aten::native_batch_norm": _rewritten(0, 1, 2),
    "aten::cudnn_batch_norm": _rewritten(0, 1, 2),
    "aten::miopen_batch_norm": _rewritten(0, 1, 2),
    "aten::native_batch_norm_backward": _rewritten(0, 1, 2, written=(1, 2)),
    "aten::cudnn_batch_norm_backward": _rewritten(0, 1, 2, written=(0, 2)),
    "aten::miopen_batch_norm_backward": _rewritten(0, 1, 2, written=(0, 2)),
    "aten::embedding": _gathered(0, 1),
    "aten::index_select": _gathered(0, 2),
    "aten::embedding_dense_backward": _scattered,
}
