"""FLOPs and bytes of an operator, from recorded shapes and types.

A multiply-add is two FLOPs; only matrix products, convolutions and attention count any. Bytes are each input read once
and each output written once: the least a kernel can move. Unlisted operators have no cost.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod

from meshwright.traces.rank.operators.bytes_moved import MOVES
from meshwright.traces.rank.operators.inputs import Call, Cost


def cost(name: str, dims: str, types: str, concrete: str) -> Cost | None:
    """Return the cost of a call from `Input Dims`, `Input type` and `Concrete Inputs` as written in the trace.

    >>> cost("aten::mm", "[[8, 16], [16, 4]]", '["c10::BFloat16", "c10::BFloat16"]', "")
    Cost(flops=1024, bytes=448, precision='bf16')
    >>> cost("aten::view", "[[8, 16], []]", '["float", "ScalarList"]', "") is None
    True
    """
    rule = PRODUCTS.get(name) or MOVES.get(name)
    if rule is None:
        return None
    try:
        return rule(Call(dims, types, concrete))
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
    ):  # shapes that do not fit this operator: not recorded, or new
        return None


def counted(name: str) -> bool:
    """Return True if calls of this operator can have a cost."""
    return name in PRODUCTS or name in MOVES


def has_flops(name: str) -> bool:
    """Return True if calls of this operator can have FLOPs, which those of an enclosing operator then repeat."""
    return name in PRODUCTS


def _product(a: int, b: int, added: int | None = None) -> Callable[[Call], Cost]:
    """Return the cost of [..., m, k] x [..., k, n], with inputs a and b; an added input is read, too."""

    def rule(call: Call) -> Cost:
        (*batch, m, k), right = call.shape(a), call.shape(b)
        if len(right) < 2 or right[-2] != k or (len(right) == len(batch) + 2 and right[:-2] != batch):
            raise ValueError(right)
        n = right[-1]
        moved = call.bytes(a, b) + prod(batch) * m * n * call.width(a)
        return call.cost(2 * prod(batch) * m * n * k, moved + (call.bytes(added) if added is not None else 0), a)

    return rule


def _linear(call: Call) -> Cost:
    (*rows, k), (n, _) = call.shape(0), call.shape(1)
    moved = call.bytes(0, 1, 2) + prod(rows) * n * call.width(0)
    return call.cost(2 * prod(rows) * n * k, moved)


def _convolution(call: Call) -> Cost:
    """Return the cost of (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, ...)."""
    (samples, _, *inside), weight = call.shape(0), call.shape(1)
    stride, padding, dilation, more = (_each(call.numbers(place), len(inside)) for place in (3, 4, 5, 7))
    reach = [d * (size - 1) + 1 for d, size in zip(dilation, weight[2:], strict=True)]
    if call.flag(6):
        channels = weight[1] * call.numbers(8)[0]
        outside = [
            (i - 1) * s - 2 * p + r + m for i, s, p, r, m in zip(inside, stride, padding, reach, more, strict=True)
        ]
        flops = 2 * samples * prod(inside) * prod(weight)
    else:
        channels = weight[0]
        outside = [(i + 2 * p - r) // s + 1 for i, s, p, r in zip(inside, stride, padding, reach, strict=True)]
        flops = 2 * samples * prod(outside) * prod(weight)
    return call.cost(flops, call.bytes(0, 1, 2) + samples * channels * prod(outside) * call.width(0))


def _convolution_backward(call: Call) -> Cost:
    """Return the cost of a convolution's backward pass.

    Inputs: (grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
    mask).
    """
    (samples, _, *outside), (_, _, *inside), weight = (call.shape(place) for place in range(3))
    once = 2 * samples * prod(inside if call.flag(7) else outside) * prod(weight)
    wanted = [word == "True" for word in re.findall("True|False", call.concrete[10])]
    written = call.bytes(1) * wanted[0] + call.bytes(2) * wanted[1]
    return call.cost(once * (wanted[0] + wanted[1]), call.bytes(0, 1, 2) + written)


def _each(values: list[int], count: int) -> list[int]:
    """Return one value per dimension; one number may stand for all."""
    return values * count if len(values) == 1 else values


def _attention(causal: int) -> Callable[[Call], Cost]:
    """Return the cost of (query, key, value, ...), each [batch, heads, length, width]; input `causal` is the mask flag."""

    def rule(call: Call) -> Cost:
        (batch, heads, asked, width), (*_, keys, _), (*_, out) = (call.shape(place) for place in range(3))
        pairs = _pairs(asked, keys, call.flag(causal))
        moved = call.bytes(0, 1, 2) + batch * heads * asked * out * call.width(0)
        return call.cost(2 * batch * heads * pairs * (width + out), moved)

    return rule


def _attention_backward(causal: int) -> Callable[[Call], Cost]:
    """Return the cost of (gradient, query, key, value, ...): scores again, then four products for three gradients."""

    def rule(call: Call) -> Cost:
        (batch, heads, asked, width), (*_, keys, _), (*_, out) = (call.shape(place) for place in (1, 2, 3))
        pairs = _pairs(asked, keys, call.flag(causal))
        moved = call.bytes(0, 1, 2, 3) + batch * heads * asked * out * call.width(1) + call.bytes(1, 2, 3)
        return call.cost(2 * batch * heads * pairs * (3 * width + 2 * out), moved, 1)

    return rule


def _pairs(asked: int, keys: int, causal: bool) -> int:
    """Return the pairs of a query and a key that it sees: with a causal mask the first query sees only the first key."""
    seen = min(asked, keys)
    return seen * (seen + 1) // 2 + (asked - seen) * keys if causal else asked * keys


PRODUCTS: dict[str, Callable[[Call], Cost]] = {
    "aten::mm": _product(0, 1),
    "aten::bmm": _product(0, 1),
    "aten::matmul": _product(0, 1),
    "aten::_scaled_mm": _product(0, 1),
    "aten::addmm": _product(1, 2, 0),
    "aten::_addmm_activation": _product(1, 2, 0),
    "aten::baddbmm": _product(1, 2, 0),
    "aten::linear": _linear,
    "aten::_convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::scaled_dot_product_attention": _attention(5),
    "aten::_scaled_dot_product_flash_attention": _attention(4),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention(4),
    "aten::_scaled_dot_product_efficient_attention": _attention(6),
    "aten::_scaled_dot_product_cudnn_attention": _attention(6),
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention(5),
    "aten::_scaled_dot_product_flash_attention_backward": _attention_backward(11),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward(7),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention_backward(11),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention_backward(14),
}
