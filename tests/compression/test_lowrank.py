"""PowerSGD against a plain implementation in float64, and against what an SVD says is possible."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshwright.base.native import compiler
from meshwright.compression import codec, codecs
from meshwright.compression.powersgd.low_rank import LowRank
from meshwright.compression.powersgd.passes import NativePasses, TorchPasses, passes
from meshwright.compression.powersgd.rounds import orthogonal
from meshwright.errors import InputError

SHAPES = [(40, 30), (17,), (8, 3, 5), (2, 2), (64, 1)]
COUNT = sum(int(np.prod(shape)) for shape in SHAPES)


def exchanged(ranks: list[LowRank], flats: list[torch.Tensor], residuals: list[torch.Tensor]) -> list[torch.Tensor]:
    """One step of several processes."""
    firsts = [low.first(*pair).clone() for low, pair in zip(ranks, zip(flats, residuals, strict=True), strict=True)]
    p = torch.stack(firsts).mean(0)
    q = torch.stack([low.second(p).clone() for low in ranks]).mean(0)
    for low in ranks:
        low.finish(q)
    return flats


def gradients(rank: int, step: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([rank, step]).normal(size=COUNT).astype(np.float32))


def test_three_steps_of_two_processes_are_as_the_paper_says() -> None:
    ranks = [LowRank(SHAPES, rank=2) for _ in range(2)]
    residuals = [torch.zeros(COUNT) for _ in range(2)]
    q = (
        torch.randn(sum(ranks[0].seconds), generator=torch.Generator().manual_seed(0))
        .double()
        .numpy()[:60]
        .reshape(2, 30)
        .T
    )
    kept = [np.zeros((40, 30)) for _ in range(2)]
    for step in range(3):
        flats = [gradients(rank, step) for rank in range(2)]
        mean = (flats[0] + flats[1]) / 2
        matrices = [flat[:1200].double().numpy().reshape(40, 30) + e for flat, e in zip(flats, kept, strict=True)]
        outs = exchanged(ranks, flats, residuals)
        p = np.linalg.qr(sum(m @ q for m in matrices) / 2)[0]
        q = sum(m.T @ p for m in matrices) / 2
        kept = [m - p @ q.T for m in matrices]
        for out, residual, e in zip(outs, residuals, kept, strict=True):
            assert np.allclose(out[:1200].numpy(), (p @ q.T).ravel(), atol=2e-5)
            assert np.allclose(residual[:1200].numpy(), e.ravel(), atol=2e-5)
        assert torch.allclose(outs[0][1200:1217], mean[1200:1217])  # the vector
        assert not residuals[0][1200:1217].any()
        assert torch.equal(outs[0], outs[1])


def test_with_warm_start_it_comes_close_to_the_best_of_its_rank() -> None:
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(n, 30)))[0] for n in (40, 30))
    matrix = (left * 0.6 ** np.arange(30)) @ right.T
    best = np.sqrt((0.6 ** (2 * np.arange(3, 30))).sum())
    low = LowRank([(40, 30)], rank=3)
    flat = torch.from_numpy(matrix.astype(np.float32).ravel())
    errors = []
    for _ in range(8):
        out = flat.clone()
        low.finish(low.second(low.first(out)))
        errors.append(float((out - flat).norm()))
    assert best * 0.999 <= errors[-1] <= best * 1.02
    assert errors[-1] < errors[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_bad_numbers_are_told_and_do_not_spread(bad: float) -> None:
    ranks = [LowRank(SHAPES, rank=2) for _ in range(2)]
    residuals = [torch.full((COUNT,), 0.5) for _ in range(2)]
    flats = [gradients(rank) for rank in range(2)]
    flats[1][3] = bad
    mean = (flats[0] + flats[1]) / 2
    outs = exchanged(ranks, flats, residuals)
    for out, residual in zip(outs, residuals, strict=True):
        assert out[:1200].isnan().all()
        assert out[1200:].isfinite().all()
        assert bool((residual[:1200] == 0.5).all())
        assert torch.allclose(out[1200:1217], mean[1200:1217] + 0.5)
    outs = exchanged(ranks, [gradients(rank) for rank in range(2)], residuals)
    assert outs[0].isfinite().all()  # the next step knows nothing of it
    assert torch.equal(outs[0], outs[1])


def test_zeros_do_not_stick() -> None:
    low, out = LowRank([(40, 30)], rank=2), torch.zeros(1200)
    low.finish(low.second(low.first(out)))
    assert not out.any()
    for _ in range(2):
        out = torch.ones(1200)
        low.finish(low.second(low.first(out)))
    assert torch.allclose(out, torch.ones(1200), atol=1e-4)


def test_columns_are_orthonormal_even_where_they_are_not_independent() -> None:
    p = torch.ones(3, 20)
    q = orthogonal(p)
    assert torch.allclose(q @ q.t(), torch.eye(3), atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 700), (700, 1), (33, 47), (64, 64), (5, 1030)])
@pytest.mark.parametrize("rank", [3, 9])
def test_passes_in_c_are_those_of_torch(shape: tuple[int, int], rank: int) -> None:
    native, plain = passes("cpu"), TorchPasses()
    assert isinstance(native, NativePasses) or not compiler()
    rows, columns = shape
    numbers = torch.Generator().manual_seed(1)
    e, residual = (torch.randn(shape, generator=numbers) for _ in range(2))
    p, q = torch.randn(rank, rows, generator=numbers), torch.randn(rank, columns, generator=numbers)
    found = []
    for way in (native, plain):
        mine, kept, left, right = e.clone(), residual.clone(), p.clone(), q.clone()
        way.first(mine, kept, right, left)
        assert left.isfinite().all()
        way.second(mine, left, right)
        told = (left.clone(), right.clone())
        way.finish(mine, kept, left, right)
        found.append((*told, mine, kept))
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
    e[-1, -1] = torch.inf
    native.first(e, None, q, p)
    assert not p.isfinite().all()


def test_it_is_listed_with_its_two_rounds() -> None:
    assert codecs()["powersgd"].rounds == 2
    with pytest.raises(InputError, match=r"two rounds.*LowRank"):
        codec("powersgd", rank=2).batch([10])
    with pytest.raises(InputError, match="rank: is 0"):
        LowRank(SHAPES, rank=0)
    with pytest.raises(InputError, match=r"gradients: has the shape \(3,\)"):
        LowRank(SHAPES).first(torch.ones(3))
