"""PowerSGD's kernels on a CUDA device against a plain implementation in float64."""

from __future__ import annotations

import pytest
import torch

from tests.compression.against_lowrank import (
    bad_numbers_are_told_and_do_not_stay,
    columns_become_orthonormal,
    steps_are_as_the_paper_says,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SHAPES = [(512, 768), (768,), (3000, 130), (64, 3, 7, 7), (256, 4096), (31, 33), (2, 2), (1000, 1)]


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 8])
def test_steps_are_as_the_paper_says(rank: int) -> None:
    steps_are_as_the_paper_says(SHAPES, rank, "cuda")


def test_aligned_matrices() -> None:
    steps_are_as_the_paper_says([(1024, 2048), (512, 512), (4096, 256)], 4, "cuda")


@pytest.mark.parametrize(("rows", "rank"), [(64, 2), (4096, 4), (5000, 8), (333, 5)])
def test_columns_become_orthonormal(rows: int, rank: int) -> None:
    columns_become_orthonormal(rows, rank, "cuda")


def test_bad_numbers_are_told() -> None:
    bad_numbers_are_told_and_do_not_stay("cuda")


def test_a_step_is_captured_in_a_graph() -> None:
    """Nothing asks the host: a replay does what the calls did."""
    from meshwright.compression.powersgd.low_rank import LowRank

    flat = torch.randn(512 * 768, device="cuda")
    lows = [LowRank([(512, 768)], 4, "cuda") for _ in range(2)]
    wanted, given = flat.clone(), flat.clone()
    for _ in range(3):
        wanted.copy_(flat)
        lows[0].finish(lows[0].second(lows[0].first(wanted)))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        given.copy_(flat)
        lows[1].finish(lows[1].second(lows[1].first(given)))
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given.copy_(flat)
        lows[1].finish(lows[1].second(lows[1].first(given)))
    for _ in range(2):
        graph.replay()
    assert torch.equal(given, wanted)
