"""Generated kernels on a CUDA device against the meaning of their algorithms in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.compression import codec, codecs
from tests.compression.against import NAMES, bad_numbers_stay_alone, compare, drawn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
COUNTS = [1_000_000, 1, 0, 4096, 65_537, 300_000, 31, 8192]


def batch(name: str, counts: list[int], dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return codec(name, **options).batch(counts, "cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_says_what_the_reference_says(name: str, dtype: torch.dtype) -> None:
    compare(batch(name, COUNTS, dtype), drawn(sum(COUNTS), dtype, "cuda"))


@pytest.mark.parametrize("name", NAMES)
def test_one_gradient_of_millions(name: str) -> None:
    compare(batch(name, [5_000_003]), drawn(5_000_003, torch.float32, "cuda"))


@pytest.mark.parametrize("name", NAMES)
def test_many_small_gradients(name: str) -> None:
    counts = [1 + i * 37 % 5000 for i in range(200)]
    compare(batch(name, counts), drawn(sum(counts), torch.float32, "cuda"))


@pytest.mark.parametrize("name", ["dgc", "graddrop", "topk"])
def test_large_numbers_that_lie_together(name: str) -> None:
    """More than lists of some tiles have room for."""
    flat = drawn(2_000_000, torch.float32, "cuda") * 1e-3
    flat[300_000:312_000] += 5.0
    compare(batch(name, [1_500_000, 500_000]), flat)


@pytest.mark.parametrize("name", NAMES)
def test_bad_numbers(name: str) -> None:
    counts = [5000, 100_000, 1, 4096, 9000]
    bad = [(1, float("nan")), (2, float("inf")), (4, -float("inf"))]
    bad_numbers_stay_alone(batch(name, counts), drawn(sum(counts), torch.float32, "cuda"), bad)


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_codec_of_the_cpu(name: str) -> None:
    flat = drawn(200_001, torch.float32, "cpu")
    results = []
    for device in ("cpu", "cuda"):
        made = codecs()[name].batch([200_001], device)
        message, out = made.new_message(), torch.empty(200_001, device=device)
        made.encode(flat.to(device), message, seed=9)
        made.decode(message, out)
        results.append(out.cpu())
    assert int((~torch.isclose(*results, rtol=1e-5)).sum()) <= 40  # near a boundary of two codes


@pytest.mark.parametrize("name", NAMES)
def test_captured_in_a_graph(name: str) -> None:
    """Nothing waits for the device: what was captured encodes whatever lies in the buffer then."""
    made, flat = batch(name, [300_000]), drawn(300_000, torch.float32, "cuda")
    message, out, expected = made.new_message(), torch.empty_like(flat), torch.empty_like(flat)
    made.encode(flat, message, seed=1)
    made.decode(message, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.encode(flat, message, seed=1)
        made.decode(message, out)
    flat.copy_(drawn(300_000, torch.float32, "cuda", seed=8))
    for _ in range(3):
        graph.replay()
    made.encode(flat, message, seed=1)
    made.decode(message, expected)
    assert torch.equal(out, expected)
