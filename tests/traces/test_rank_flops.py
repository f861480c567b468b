"""FLOPs against torch's own counter, on calls that the profiler wrote down; bytes by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from meshwright.traces.rank.issued import issued
from meshwright.traces.rank.operators.flops import cost
from meshwright.traces.rank.operators.operators import operators_of
from meshwright.traces.reading import read_trace


def seen(run: Callable[[], Any], path: Path) -> int:
    """FLOPs that our table counts in a profile of a run."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        run()
    file = path / "trace.json"
    found.export_chrome_trace(str(file))
    trace = read_trace(file)
    return operators_of(trace, issued(trace), None).flops


def convolve(sizes: tuple[int, ...], channels: int, wanted: bool = True, **how: Any) -> Callable[[], None]:
    kind = [torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d][len(sizes) - 3]
    if how.pop("transposed", False):
        kind = [torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d][len(sizes) - 3]

    def run() -> None:
        layer = kind(sizes[1], channels, 3, **how)
        layer(torch.randn(sizes, requires_grad=wanted)).sum().backward()

    return run


def attend(batch: int, heads: int, asked: int, keys: int, width: int) -> Callable[[], None]:
    def run() -> None:
        q = torch.randn(batch, heads, asked, width, requires_grad=True)
        k, v = (torch.randn(batch, heads, keys, width, requires_grad=True) for _ in range(2))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            F.scaled_dot_product_attention(q, k, v).sum().backward()

    return run


def with_gradients(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> Callable[[], None]:
    return lambda: function(*(torch.randn(shape, requires_grad=True) for shape in shapes)).sum().backward()


@pytest.mark.parametrize(
    "run",
    [
        with_gradients(torch.mm, (5, 7), (7, 3)),
        with_gradients(torch.addmm, (3,), (5, 7), (7, 3)),
        with_gradients(torch.bmm, (2, 5, 7), (2, 7, 3)),
        with_gradients(torch.baddbmm, (2, 5, 3), (2, 5, 7), (2, 7, 3)),
        with_gradients(torch.matmul, (4, 2, 5, 7), (7, 3)),
        with_gradients(torch.matmul, (4, 2, 5, 7), (4, 2, 7, 3)),
        with_gradients(F.linear, (4, 5, 7), (3, 7), (3,)),
        with_gradients(F.linear, (4, 5, 7), (3, 7)),
        convolve((2, 3, 9), 4),
        convolve((2, 3, 9, 8), 4, stride=2, padding=1),
        convolve((2, 3, 9, 8), 4, dilation=2, bias=False),
        convolve((2, 3, 9, 8), 4, wanted=False),
        convolve((2, 3, 7, 6, 5), 4),
        convolve((2, 3, 9, 8), 4, stride=2, transposed=True, output_padding=1),
        attend(2, 3, 5, 5, 8),
        attend(1, 2, 4, 9, 16),
    ],
)
def test_flops_are_those_of_torchs_counter(run: Callable[[], None], tmp_path: Path) -> None:
    with FlopCounterMode(display=False) as counter:
        run()
    assert counter.get_total_flops() > 0
    assert seen(run, tmp_path) == counter.get_total_flops()


SHAPES = {"q": [2, 4, 6, 8], "k": [2, 4, 10, 8], "v": [2, 4, 10, 16], "out": [2, 4, 6, 16]}


KINDS = [
    name + ending
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    for ending in ("", "_backward")
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", [*KINDS, "fused_attention_overrideable"])
def test_attention_of_every_kind(name: str, causal: bool) -> None:
    """By torch's schema: which input says that the mask is causal. A causal mask counts the pairs that it lets through."""
    full, ending = f"_scaled_dot_product_{name}", name.endswith("_backward")
    arguments = [argument.name for argument in getattr(torch.ops.aten, full).default._schema.arguments]
    tensors = {"query": "q", "key": "k", "value": "v", "grad_out": "out", "grad_out_": "out", "out": "out"}
    dims = [SHAPES[tensors[word]] if word in tensors else [] for word in arguments]
    types = ["c10::Half" if word in tensors else "" for word in arguments]
    concrete = [str(causal) if word == "is_causal" else "" for word in arguments]
    found = cost(f"aten::{full}", json.dumps(dims), json.dumps(types), json.dumps(concrete))
    pairs = int(np.tri(6, 10).sum()) if causal else 60
    products = 2 * 8 + 16 + 16 + 8 if ending else 8 + 16  # widths of each product's inner or outer dimension
    assert found is not None
    assert found.flops == 2 * 2 * 4 * pairs * products
    if not causal and not ending and hasattr(torch.utils.flop_counter, "sdpa_flop_count"):
        assert found.flops == torch.utils.flop_counter.sdpa_flop_count(SHAPES["q"], SHAPES["k"], SHAPES["v"])
    if not causal and ending:
        counted = torch.utils.flop_counter.sdpa_backward_flop_count
        assert found.flops == counted(SHAPES["out"], SHAPES["q"], SHAPES["k"], SHAPES["v"])


def test_groups_multiply_only_within() -> None:
    dims = [[2, 4, 8], [6, 2, 3], [6], [], [], [], [], [], []]
    types = ["float", "float", "float", *[""] * 6]
    concrete = ["", "", "", "[1]", "[0]", "[1]", "False", "[0]", "2"]
    found = cost("aten::_convolution", *(json.dumps(part) for part in (dims, types, concrete)))
    by_hand = sum(
        2 for _sample in range(2) for _out in range(6) for _at in range(6) for _in in range(2) for _k in range(3)
    )
    assert found is not None
    assert found.flops == by_hand
    assert found.bytes == 4 * (2 * 4 * 8 + 6 * 2 * 3 + 6 + 2 * 6 * 6)


@pytest.mark.parametrize(
    ("name", "dims", "types", "concrete", "wanted"),
    [
        ("aten::add", [[8, 1], [4], []], ["float", "float", "Scalar"], [], 4 * (8 + 4 + 32)),
        ("aten::mul_", [[8, 4], []], ["c10::Half", "double"], [], 2 * 32 + 8 + 2 * 32),
        ("aten::eq", [[8], [8]], ["float", "float"], [], 4 * 16 + 8),
        ("aten::copy_", [[8, 4], [8, 4], []], ["c10::BFloat16", "float", "Scalar"], [], 32 * 6),
        ("aten::copy_", [[8, 4], [1, 4], []], ["float", "float", "Scalar"], [], 32 * 4 + 16),
        ("aten::zero_", [[8, 4]], ["double"], [], 256),
        ("aten::native_dropout", [[10], [], []], ["c10::Half", "Scalar", "Scalar"], [], 50),
        ("aten::native_layer_norm", [[3, 8], [], [8], [8], []], ["float", "", "float", "float", ""], [], 4 * (24 + 16 + 24)),
        ("aten::_softmax_backward_data", [[3, 8], [3, 8], [], []], ["float", "float", "", ""], [], 4 * 72),
        ("aten::embedding", [[100, 8], [2, 3]], ["c10::Half", "long int"], [], 6 * 8 + 2 * 6 * 8 * 2),
        ("aten::embedding_dense_backward", [[2, 3, 8], [2, 3], [], [], []], ["float", "long int", "", "", ""],
         ["", "", "100", "-1", "False"], 4 * 48 + 48 + 4 * 800),
        ("aten::mm", [[8, 16], [16, 4]], ["c10::Float8_e4m3fn", "c10::Float8_e4m3fn"], [], 128 + 64 + 32),
    ],
)  # fmt: skip
def test_bytes_by_hand(name: str, dims: list[Any], types: list[str], concrete: list[str], wanted: int) -> None:
    found = cost(name, json.dumps(dims), json.dumps(types), json.dumps(concrete))
    assert found is not None
    assert found.bytes == wanted


@pytest.mark.parametrize(
    ("dims", "types"),
    [("[[8, 16], [4, 4]]", '["float", "float"]'), ("[]", "[]"), ("[[8]]", '["float"]'), ("[[8, 2", '["float"]'),
     ("[[8, 16], [16, 4]]", '["what", "float"]'), ("[[[8, 16]], [16, 4]]", '["TensorList", "float"]')],
)  # fmt: skip
def test_shapes_that_do_not_fit_have_no_cost(dims: str, types: str) -> None:
    assert cost("aten::mm", dims, types, "") is None
