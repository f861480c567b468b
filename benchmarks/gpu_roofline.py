"""The least time that a training step of a Llama can take on the device at hand, from rates measured there and then.

Every product, in both passes, at the rate of its own shape; attention at its own; every other pass over memory that
cannot be avoided at the rate of a copy. Nothing overlaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from blocks_on_device import measure
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

PEAK = 989e12  # dense bfloat16 FLOP/s of an H100 or H200, NVIDIA's datasheet


def flops(config: dict[str, Any], samples: int, length: int) -> float:
    """Of one step: 6 per parameter of a product and token, and the pairs that a causal mask lets through."""
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    per_layer = sum(k * n for k, n in products(config))
    width = config["num_attention_heads"] * config["head_dim"]
    tokens = samples * length
    return 6.0 * tokens * (layers * per_layer + hidden * vocab) + 3 * 4.0 * layers * width * tokens * length / 2


def products(config: dict[str, Any]) -> list[tuple[int, int]]:
    """(in, out) of the four products of a layer."""
    hidden, size, wide = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return [(hidden, q + 2 * kv), (q, hidden), (hidden, 2 * wide), (wide, hidden)]


@dataclass(frozen=True)
class Floor:
    """Seconds of a step."""

    matmul: float
    attention: float
    bytes: float

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.bytes


def floor(config: dict[str, Any], samples: int, length: int, parameters: int) -> Floor:
    """Products, attention and memory traffic of one step, each measured now."""
    layers, tokens = config["num_hidden_layers"], samples * length
    matmul = layers * sum(_product(tokens, k, n) for k, n in products(config))
    head = _product(2048, config["hidden_size"], config["vocab_size"]) * tokens / 2048
    return Floor(
        matmul + head, layers * _attention(config, samples, length), _bytes(config, tokens, parameters) / _copy()
    )


def _product(tokens: int, k: int, n: int) -> float:
    """All three products of one weight: forward, and the gradients of input and weight."""
    x, w, dy = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((tokens, k), (n, k), (tokens, n))
    )
    return measure(lambda: x @ w.t()) + measure(lambda: dy @ w) + measure(lambda: dy.t() @ x)


def _attention(config: dict[str, Any], samples: int, length: int) -> float:
    def heads(count: int) -> Tensor:
        shape = (samples, length, count, config["head_dim"])
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()

    q, k, v = (heads(config[f"num_{kind}_heads"]) for kind in ("attention", "key_value", "key_value"))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        grad = torch.randn_like(out)
        there = measure(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        back = measure(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    return there + back


def _bytes(config: dict[str, Any], tokens: int, parameters: int) -> float:
    """Passes over memory between products, in bytes: two per element of bfloat16.

    A layer: two norms (2 passes forward; backward x, its gradient, the residual's and the result: 4), two additions (3),
    q and k turned (2 each way) and v's gradient moved (2), gates (3 widths forward, 5 backward). Logits: written by the
    product, read for the sum, read and written for gradients, of which the products' own reads are theirs. AdamW with
    8-bit states: weight and both states read and written, gradient read: 10 bytes a parameter.
    """
    hidden, size, wide = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    turned, kv = (
        (config["num_attention_heads"] + config["num_key_value_heads"]) * size,
        config["num_key_value_heads"] * size,
    )
    layer = 2 * (2 + 4 + 3) * hidden + 4 * turned + 2 * kv + 8 * wide
    return 2.0 * tokens * (config["num_hidden_layers"] * layer + 3 * config["vocab_size"]) + 10.0 * parameters


def _copy() -> float:
    """Bytes per second, read and written."""
    x = torch.randn(2**29, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return 2 * x.nbytes / measure(lambda: y.copy_(x))
