"""Fit the constants that no measurement of ours gives to published runs: robust Gauss-Newton in logarithms.

Each constant is drawn towards what was known before any row was looked at (measured here, or published), with the weight
of a few rows, so that one that the rows say nothing about stays there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log

import numpy as np

from meshwright.cost.constants import DEFAULT, Constants

# (name, what was known before any row was looked at, lowest, highest). Bounds keep a constant what it means, for instance
# a part of a peak below one. Before: what the H200 measured, what SimuMax printed for its B200, what papers print.
FITTED = (
    ("ampere.products.0", 0.77, 0.70, 0.87),  # best shape 0.869, times what the H200 sustains of its best
    ("hopper.products.0", 0.715, 0.62, 0.80),  # H200
    ("hopper.products.1", 0.69, 0.60, 0.80),  # H200
    ("blackwell.products.0", 0.49, 0.42, 0.60),  # SimuMax's B200
    ("blackwell.products.1", 0.49, 0.40, 0.65),  # as 16 bits
    ("blackwell.products.2", 0.45, 0.30, 0.60),
    ("ampere.triton", 0.36, 0.30, 0.50),  # FlashAttention-1: 0.25-0.40 (Dao, 2023)
    ("hopper.triton", 0.20, 0.15, 0.30),  # half of FlashAttention-2 there
    ("memory", 0.67, 0.55, 0.90),  # SimuMax's B200; the H200: 0.63-0.90
    ("nvlink", 0.70, 0.60, 0.85),  # SimuMax's B200: 0.67-0.74
    ("network", 0.85, 0.70, 0.95),
    ("contention", 0.15, 0.05, 0.30),  # the part of the processors that NCCL's channels take
    ("straggler", 0.005, 0.001, 0.01),
    ("power", 0.6, 0.3, 1.0),
)
_STEP = 0.02  # relative step of the numerical derivative
_SCALE = 0.06  # errors beyond this count less and less (soft L1)
_PRIOR = 1.0  # weight of what was known before, in rows


def get(constants: Constants, name: str) -> float:
    """The value of a fitted constant."""
    if "." not in name:
        return float(getattr(constants, name))
    family, kind, *index = name.split(".")
    return float(getattr(constants.architectures[family], kind)[int(index[0]) if index else 0])


def put(constants: Constants, values: dict[str, float]) -> Constants:
    """Constants with some of them changed; both passes of an attention kernel change together."""
    table = dict(constants.architectures)
    plain = {}
    for name, value in values.items():
        if "." not in name:
            plain[name] = value
            continue
        family, kind, *index = name.split(".")
        old = getattr(table[family], kind)
        if index:
            new = tuple(value if i == int(index[0]) else part for i, part in enumerate(old))
        else:
            new = tuple(part * value / old[0] for part in old)
        table[family] = replace(table[family], **{kind: new})
    return replace(constants, architectures=table, **plain)


Predict = Callable[[Constants], np.ndarray]


def jacobian(predict: Predict, constants: Constants) -> tuple[np.ndarray, np.ndarray]:
    """(logarithms of the predictions, their derivatives by the logarithm of each constant)."""
    tried = [constants]
    tried += [put(constants, {name: get(constants, name) * (1 + _STEP)}) for name, *_ in FITTED]
    found = np.log(np.array([predict(candidate) for candidate in tried]))
    return found[0], (found[1:] - found[0]).T / np.log1p(_STEP)


def fit(
    at: np.ndarray, slope: np.ndarray, measured: np.ndarray, sources: Sequence[str], start: Constants = DEFAULT
) -> Constants:
    """The constants that fit best, by the linear model around `start`; each source weighs as the root of its rows."""
    count = Counter(sources)
    weight = np.array([1 / count[s] ** 0.5 for s in sources])
    weight *= len(weight) / weight.sum()
    error = at - np.log(measured)
    before, low, high = (np.array([log(row[i] / get(start, row[0])) for row in FITTED]) for i in (1, 2, 3))
    step = np.zeros(slope.shape[1])
    for _ in range(50):  # iteratively reweighted least squares
        left = error + slope @ step
        w = weight / np.sqrt(1 + (left / _SCALE) ** 2)
        normal = slope.T @ (w[:, None] * slope) + _PRIOR * np.eye(len(step))
        step = np.clip(np.linalg.solve(normal, _PRIOR * before - slope.T @ (w * error)), low, high)
    return put(start, {name: get(start, name) * float(np.exp(s)) for (name, *_), s in zip(FITTED, step, strict=True)})
