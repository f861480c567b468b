"""Generated Triton kernels, run by Triton's interpreter on the CPU: `test_triton.py` runs this file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshwright.compression import Codec, codecs
from meshwright.compression.language import choose, half, index, larger, magnitude, mean, spread, total, uniform, where
from meshwright.compression.powersgd import cuda, triton_kernels
from meshwright.errors import InputError
from tests.compression.against import NAMES, bad_numbers_stay_alone, compare, drawn
from tests.compression.against_lowrank import (
    bad_numbers_are_told_and_do_not_stay,
    columns_become_orthonormal,
    steps_are_as_the_paper_says,
)

CPU = torch.device("cpu")
TILE = 512
COUNTS = [0, 1, 511, 512, 1300, 7, 0]


def batch(codec: Codec, counts: list[int], dtype: torch.dtype = torch.float32, tile: int = TILE) -> Any:
    from meshwright.compression.backends.triton.batch import TritonBatch

    return TritonBatch(codec.program, counts, CPU, dtype, tile=tile)


@pytest.mark.parametrize("name", NAMES)
def test_says_what_the_reference_says(name: str) -> None:
    compare(batch(codecs()[name], COUNTS), drawn(sum(COUNTS), torch.float32, "cpu"), allowed=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["bf16", "int4", "topk", "terngrad"])
def test_halves_are_encoded_too(name: str, dtype: torch.dtype) -> None:
    compare(batch(codecs()[name], [600, 33], dtype), drawn(633, dtype, "cpu"), allowed=0)


@pytest.mark.parametrize("name", ["onebit", "tbq", "int4", "topk"])
def test_every_remainder_of_a_byte_and_a_block(name: str) -> None:
    counts = [*range(1, 10), 255, 256, 257]
    compare(batch(codecs()[name], counts), drawn(sum(counts), torch.float32, "cpu"), allowed=0)


def test_a_sample_gives_the_threshold() -> None:
    """Long enough for one run in two to be left out."""
    compare(batch(codecs()["dgc"], [140_007, 40], tile=32768), drawn(140_047, torch.float32, "cpu"), allowed=0)


@pytest.mark.parametrize("name", ["dgc", "graddrop", "topk"])
def test_large_numbers_that_lie_together(name: str) -> None:
    """More than a tile's list has room for, in some tiles; fewer than the message has room for, and more."""
    flat = drawn(4500, torch.float32, "cpu") * 1e-3
    flat[600:700] += 5.0
    flat[1900:1905] -= 7.0
    compare(batch(codecs()[name], [4000, 500]), flat.clone(), allowed=0)
    compare(batch(Codec("part", *_largest(0.05)), [1500, 3000]), flat, allowed=0)


def _largest(part: float) -> tuple[Any, Any]:
    def encode(g: Any) -> Any:
        chosen = choose(magnitude(g) >= 1.0, part)
        return {"index": chosen.index, "value": chosen.take(g)}

    return encode, lambda m: spread(m["index"] + 0, m["value"])


@pytest.mark.parametrize("name", NAMES)
def test_bad_numbers(name: str) -> None:
    bad = [(1, float("nan")), (2, float("inf")), (4, -float("inf"))]
    counts = [70, 600, 1, 520, 90]
    bad_numbers_stay_alone(batch(codecs()[name], counts), drawn(1281, torch.float32, "cpu"), bad, allowed=0)


def test_bad_numbers_are_seen_where_statistics_are_of_something_else() -> None:
    def encode(g: Any) -> Any:
        return {"number": half(g), "many": total(where(uniform() < 0.5, 1, 0))}

    def decode(m: Any) -> Any:
        return m["number"] + m["many"] * 0

    bad, counts = [(0, float("nan")), (2, float("inf"))], [600, 520, 90]
    flat = drawn(1210, torch.float32, "cpu")
    bad_numbers_stay_alone(batch(Codec("other", encode, decode), counts), flat, bad, allowed=0)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str) -> None:
    codec = batch(codecs()[name], [700])
    message, out = codec.new_message(), torch.ones(700)
    codec.encode(torch.zeros(700), message)
    codec.decode(message, out)
    assert not out.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decodes_into_halves(dtype: torch.dtype) -> None:
    flat = drawn(600, torch.float32, "cpu")
    codec = batch(codecs()["int8"], [600])
    message, exact, rounded = codec.new_message(), torch.empty(600), torch.empty(600, dtype=dtype)
    codec.encode(flat, message)
    codec.decode(message, exact)
    codec.decode(message, rounded)
    assert torch.equal(exact.to(dtype), rounded)


def test_a_value_that_is_agreed_on() -> None:
    flat = drawn(900, torch.float32, "cpu")
    codec = batch(codecs()["homomorphic"], [500, 400])
    codec.measure(flat)
    assert torch.equal(codec.agreed, torch.stack([flat[:500].abs().max(), flat[500:].abs().max()]))
    codec.agreed.fill_(float(flat.abs().max()))
    message, out = codec.new_message(), torch.empty(900)
    codec.encode(flat, message, agreed=True)
    codec.decode(message, out)
    assert (out - flat).abs().max() <= flat.abs().max() / 31 * 1.001  # one level: 127 // 4 members
    assert torch.equal(codec.agreed, flat.abs().max().expand(2))


def test_an_algorithm_of_ones_own() -> None:
    """Statistics of three levels, whole numbers reduced, and a choice by a test of its own."""

    def encode(g: Any) -> Any:
        size = mean(magnitude(g))
        above = total(where(magnitude(g) > size, magnitude(g), 0.0)) / larger(
            total(where(magnitude(g) > size, 1, 0)), 1
        )
        chosen = choose((magnitude(g) >= above) & (index() >= 3), 0.2)
        return {"index": chosen.index, "times": chosen.take(g) / above, "above": above}

    def decode(m: Any) -> Any:
        return spread(m["index"], m["times"] * m["above"])

    compare(batch(Codec("own", encode, decode), COUNTS), drawn(sum(COUNTS), torch.float32, "cpu"), allowed=0)


def test_what_is_computed_after_spreading_is_refused() -> None:
    def encode(g: Any) -> Any:
        chosen = choose(g > 0, 0.5)
        return {"index": chosen.index, "value": chosen.take(g)}

    codec = Codec("after", encode, lambda m: spread(m["index"], m["value"]) * 2)
    with pytest.raises(InputError, match="spread"):
        batch(codec, [10])


def test_buffers_that_do_not_fit_are_refused() -> None:
    codec = batch(codecs()["int8"], [100])
    with pytest.raises(InputError, match="gradients"):
        codec.encode(torch.zeros(99), codec.new_message())


@pytest.fixture
def short_columns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter adds up one number after the other; and short columns have more than one part."""
    monkeypatch.setattr(triton_kernels, "COLUMN", 64)
    cuda.kernels.cache_clear()
    yield
    cuda.kernels.cache_clear()


@pytest.mark.usefixtures("short_columns")
def test_low_rank_steps_are_as_the_paper_says() -> None:
    """Rows and columns beside every tile's, two chunks of rows, gradients that are sent as they are, a smaller rank."""
    steps_are_as_the_paper_says([(150, 20), (17,), (2, 600)], 3, "cpu", steps=2)


@pytest.mark.usefixtures("short_columns")
@pytest.mark.parametrize(("rows", "rank"), [(40, 2), (100, 3)])
def test_columns_become_orthonormal(rows: int, rank: int) -> None:
    columns_become_orthonormal(rows, rank, "cpu")


@pytest.mark.usefixtures("short_columns")
def test_bad_numbers_of_low_rank_are_told() -> None:
    bad_numbers_are_told_and_do_not_stay("cpu")
