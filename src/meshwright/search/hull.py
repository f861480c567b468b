"""The lower hull of seconds over bytes: the ways to save memory that a mix of others does not beat."""

from __future__ import annotations

from collections.abc import Sequence


def hull(seconds: Sequence[float], size: Sequence[float]) -> list[int]:
    """Points on it, from the fastest on to the one of the fewest bytes.

    >>> hull([1.0, 1.1, 1.9, 2.0], [10.0, 6.0, 5.0, 1.0])
    [0, 1, 3]
    """
    at = min(range(len(seconds)), key=lambda i: (seconds[i], size[i]))
    found = [at]
    while left := [i for i in range(len(seconds)) if size[i] < size[at] * (1 - 1e-9)]:
        at = min(left, key=lambda i: ((seconds[i] - seconds[found[-1]]) / (size[found[-1]] - size[i]), size[i]))
        found.append(at)
    return found
