"""Fit the constants that no measurement of ours gives to published runs: robust Gauss-Newton in logarithms.

Each constant is drawn towards the value it has (a measured or published one) with the weight of a few rows, so that one
that the rows say nothing about stays where it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log

import numpy as np

from meshwright.cost.constants import DEFAULT, Constants

# (name, lowest, highest): bounds keep a constant what it means, for instance a part of a peak below one.
FITTED = (
    ("ampere.products.0", 0.70, 0.87), ("hopper.products.0", 0.62, 0.80), ("hopper.products.1", 0.60, 0.80),
    ("blackwell.products.0", 0.42, 0.60), ("blackwell.products.1", 0.40, 0.65), ("blackwell.products.2", 0.30, 0.60),
    ("ampere.triton", 0.30, 0.50), ("hopper.triton", 0.15, 0.30),
    ("memory", 0.60, 0.90), ("nvlink", 0.60, 0.85), ("network", 0.70, 0.95), ("contention", 0.05, 0.30),
    ("straggler", 0.001, 0.01), ("power", 0.3, 1.0),
)  # fmt: skip
_STEP = 0.02  # relative step of the numerical derivative
_SCALE = 0.06  # errors beyond this count less and less (soft L1)
_PRIOR = 1.0  # weight of a constant's own value, in rows


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
    tried += [put(constants, {name: get(constants, name) * (1 + _STEP)}) for name, _, _ in FITTED]
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
    low = np.array([log(a / get(start, name)) for name, a, _ in FITTED])
    high = np.array([log(b / get(start, name)) for name, _, b in FITTED])
    step = np.zeros(slope.shape[1])
    for _ in range(50):  # iteratively reweighted least squares
        left = error + slope @ step
        w = weight / np.sqrt(1 + (left / _SCALE) ** 2)
        normal = slope.T @ (w[:, None] * slope) + _PRIOR * np.eye(len(step))
        step = np.clip(np.linalg.solve(normal, -slope.T @ (w * error)), low, high)
    return put(start, {name: get(start, name) * float(np.exp(s)) for (name, _, _), s in zip(FITTED, step, strict=True)})
