"""PowerSGD on a device against a plain implementation in float64."""

from __future__ import annotations

import numpy as np
import torch

from meshwright.compression.powersgd.cuda import DeviceRounds
from meshwright.compression.powersgd.low_rank import LowRank

Shape = tuple[int, ...]


def low_rank(shapes: list[Shape], rank: int, device: str) -> LowRank:
    """With the passes of a device, also where the interpreter plays it."""
    low = LowRank(shapes, rank, device)
    low._rounds = DeviceRounds(low.shapes, low.ranks, low._q)
    return low


def steps_are_as_the_paper_says(shapes: list[Shape], rank: int, device: str, steps: int = 3) -> None:
    """Two processes, residuals, matrices and what is sent as it is: the mean and what each lacks of it."""
    lows = [low_rank(shapes, rank, device) for _ in range(2)]
    counts = lows[0].counts
    rng = np.random.default_rng(len(shapes) + rank)
    residuals = [torch.zeros(sum(counts), device=device) for _ in lows]
    kept = [[np.zeros(shape) for shape in lows[0].shapes] for _ in lows]
    parts = np.split(lows[0]._q.double().cpu().numpy(), np.cumsum(lows[0].seconds)[:-1])
    q = [part.reshape(max(r, 1), -1).T for part, r in zip(parts, lows[0].ranks, strict=True)]
    for _ in range(steps):
        drawn = [rng.normal(size=sum(counts)).astype(np.float32) for _ in lows]
        flats = [torch.from_numpy(one.copy()).to(device) for one in drawn]
        p = torch.stack([low.first(f, e).clone() for low, f, e in zip(lows, flats, residuals, strict=True)]).mean(0)
        mean = torch.stack([low.second(p).clone() for low in lows]).mean(0)
        for low in lows:
            low.finish(mean)
        assert torch.equal(flats[0], flats[1])
        edges = np.cumsum(counts)[:-1]
        for i, (shape, r) in enumerate(zip(lows[0].shapes, lows[0].ranks, strict=True)):
            whole = [
                np.split(one.astype(float), edges)[i].reshape(shape) + e[i] for one, e in zip(drawn, kept, strict=True)
            ]
            if r:
                left = np.linalg.qr(sum(m @ q[i] for m in whole) / 2)[0]
                q[i] = sum(m.T @ left for m in whole) / 2
                said = left @ q[i].T
            else:
                said = sum(whole) / 2
            for k, m in enumerate(whole):
                kept[k][i] = m - said if r else np.zeros(shape)
                scale = np.abs(m).max()
                _close(flats[k], edges, i, said, scale)
                _close(residuals[k], edges, i, kept[k][i], scale)


def _close(flat: torch.Tensor, edges: np.ndarray, i: int, wanted: np.ndarray, scale: float) -> None:
    found = np.split(flat.double().cpu().numpy(), edges)[i].reshape(wanted.shape)
    assert np.abs(found - wanted).max() <= 1e-5 * scale * np.sqrt(max(wanted.shape))


def columns_become_orthonormal(rows: int, rank: int, device: str) -> None:
    """Independent ones, nearly the same ones, equal ones and zeros: what they spanned stays within."""
    rng = np.random.default_rng(rows)
    cases = [rng.normal(size=(rank, rows)) * 10.0 ** rng.integers(-12, 12, size=(rank, 1))]
    near = np.ones((rank, 1)) @ rng.normal(size=(1, rows)) + 1e-4 * rng.normal(size=(rank, rows))
    cases += [near, np.ones((rank, rows)), np.zeros((rank, rows))]
    for case in cases:
        low = low_rank([(rows, 4 * rank + 64)], rank, device)
        given = case.astype(np.float32)
        low._rounds.first(torch.zeros(low.counts[0], device=device), None, low._q, low._p)
        low._flat = torch.zeros(low.counts[0], device=device)
        low.second(torch.from_numpy(given.ravel()).to(device))
        p = low._p.view(rank, rows).double().cpu().numpy()
        assert np.abs(p @ p.T - np.eye(rank)).max() < 2e-5
        lost = given - given.astype(float) @ p.T @ p
        size = np.abs(given).max(1, keepdims=True)
        assert (np.abs(lost) <= 2e-5 * size * np.sqrt(rows)).all()


def bad_numbers_are_told_and_do_not_stay(device: str) -> None:
    shapes: list[Shape] = [(40, 30), (17,), (20, 30)]
    lows = [low_rank(shapes, 2, device) for _ in range(2)]
    total = sum(lows[0].counts)
    residuals = [torch.full((total,), 0.5, device=device) for _ in lows]
    for bad in (torch.nan, torch.inf, None):
        flats = [
            torch.from_numpy(np.random.default_rng(k).normal(size=total).astype(np.float32)).to(device) for k in (0, 1)
        ]
        if bad is not None:
            flats[1][3] = bad
        p = torch.stack([low.first(f, e).clone() for low, f, e in zip(lows, flats, residuals, strict=True)]).mean(0)
        q = torch.stack([low.second(p).clone() for low in lows]).mean(0)
        for low in lows:
            low.finish(q)
        assert torch.equal(flats[0], flats[1]) or bad is not None
        for flat, residual in zip(flats, residuals, strict=True):
            assert flat[:1200].isnan().all() if bad is not None else flat.isfinite().all()
            assert flat[1200:].isfinite().all()
            assert bad is None or bool((residual[:1200] == 0.5).all())
