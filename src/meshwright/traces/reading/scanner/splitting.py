"""Find the ends of a JSON list's items with NumPy, for the portable scanner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QUOTE, BACKSLASH = ord('"'), ord("\\")


@dataclass(frozen=True, eq=False)
class Split:
    """Items in a piece of a list's text."""

    spans: NDArray[np.int64]  # first byte and the one after the last, of each complete object or list
    stop: int  # up to here all items are complete; -1: none is
    done: bool  # a bracket that ends the list is at `stop`


def split(text: NDArray[np.uint8]) -> Split:
    """Split a piece of a list's text into items.

    >>> found = split(np.frombuffer(b'{"a": "}"}, {}, {"b', np.uint8))
    >>> found.spans.tolist(), found.stop, found.done
    ([[0, 10], [12, 14]], 14, False)
    """
    places = np.flatnonzero(_SIGNS[text])
    signs = text[places]
    quotes = signs == QUOTE
    if (text == BACKSLASH).any():
        quotes[quotes] = ~_escaped(text, places[quotes])
        places, signs, quotes = places[(signs != QUOTE) | quotes], signs[(signs != QUOTE) | quotes], None
        quotes = signs == QUOTE
    outside = (np.cumsum(quotes) % 2 == 0) & ~quotes
    places, steps = places[outside], _STEPS[signs[outside]]
    depth = np.cumsum(steps)
    ends = np.flatnonzero(depth < 0)
    done = len(ends) > 0
    if done:  # the list's own bracket; what follows is outside the list
        places, steps, depth, stop = places[: ends[0]], steps[: ends[0]], depth[: ends[0]], int(places[ends[0]])
    firsts, lasts = places[(depth == 1) & (steps == 1)], places[depth == 0]
    spans = np.stack([firsts[: len(lasts)], lasts + 1], axis=1)
    if not done:
        stop = int(lasts[-1]) + 1 if len(lasts) else -1
    return Split(spans, stop, done)


def _escaped(text: NDArray[np.uint8], quotes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return True for quotes that follow an odd number of backslashes."""
    places = np.flatnonzero(text != BACKSLASH)
    before = np.searchsorted(places, quotes) - 1  # the last other byte before each quote
    start = np.where(before >= 0, places[before], -1)
    return np.asarray((quotes - start - 1) % 2 == 1)


_SIGNS = np.zeros(256, np.bool_)
_SIGNS[[ord(sign) for sign in '"{}[]']] = True
_STEPS = np.zeros(256, np.int64)
_STEPS[[ord("{"), ord("[")]] = 1
_STEPS[[ord("}"), ord("]")]] = -1
