"""Lower bound on the cost of memory: bytes get a price, and every layer takes its cheapest mode.

This is Lagrangian relaxation. For a device group that keeps `a` micro-batches, under any modes of its layers,

    seconds >= sum over layers of min over modes (seconds + x kept + y parked) - x D / a - y H / a

for any prices x, y >= 0 in seconds per byte of one micro-batch. D and H are the bytes of device and host for
activations. The best of a few prices is a bound close to the truth. It holds for layers of any kinds in any mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

# Lower hull of seconds over bytes: the memory savings that no mix of others beats.


def hull(seconds: Sequence[float], size: Sequence[float]) -> list[int]:
    """Return the points on the hull, from the fastest to the one of the fewest bytes.

    >>> hull([1.0, 1.1, 1.9, 2.0], [10.0, 6.0, 5.0, 1.0])
    [0, 1, 3]
    """
    at = min(range(len(seconds)), key=lambda i: (seconds[i], size[i]))
    found = [at]
    while left := [i for i in range(len(seconds)) if size[i] < size[at] * (1 - 1e-9)]:
        at = min(left, key=lambda i: ((seconds[i] - seconds[found[-1]]) / (size[found[-1]] - size[i]), size[i]))
        found.append(at)
    return found


Array = Any
_ROUNDING = 1e-6  # of a layer's seconds
_HALVINGS = 10  # of the rate of updates on the host
_DEAR = 1e3  # times the seconds of all layers, for all bytes they keep: a price that only shows whether the bytes fit


@dataclass(frozen=True)
class Relaxed:
    """Relaxed costs as arrays of (price, choice), or (price, sort, choice)."""

    device: Array  # seconds per byte of one micro-batch
    host: Array
    longer: Array  # least extra seconds of a layer, at prices for what it keeps and parks
    longer_back: Array  # of its backward pass only; no prices if no mode slows the forward pass
    longest: Array  # (sort, choice): most extra seconds of a layer, rounded up a little
    usual: int  # number of prices useful in every pipeline; those of offloaded updates follow

    def take(self, rows: Array) -> Relaxed:
        """Return the costs of some choices."""
        device, host, longer, back, longest = (
            part[..., rows] for part in (self.device, self.host, self.longer, self.longer_back, self.longest)
        )
        return Relaxed(device, host, longer, back, longest, self.usual)

    def near(self, parts: Array) -> Relaxed:
        """Return the costs with the prices of optimizer states that matter for these parts in flight."""
        if self.usual == len(self.device):
            return self
        low, high = (-np.log2([parts.max(), parts.min()])).clip(0, len(self.device) - self.usual - 1)
        some = np.r_[: self.usual, self.usual + int(low) : self.usual + int(np.ceil(high)) + 1]
        back = self.longer_back[some] if len(self.longer_back) else self.longer_back
        return Relaxed(self.device[some], self.host[some], self.longer[some], back, self.longest, self.usual)


def relaxed(every: Array, forward: Array, backward: Array, kept: Array, parked: Array, rate: Array) -> Relaxed:
    """Return the costs from seconds and bytes of (mode, sort, choice); `every`: layers of each sort in the model.

    `rate`: seconds of the update per offloaded byte of optimizer states. If a part of all micro-batches is in flight, a
    byte of activations is worth that part of it.
    """
    both = forward + backward
    total = [np.einsum("s,rsc->rc", every, part) for part in (both, kept, parked)]
    device, host = _prices(*total)
    usual = len(device)
    if rate.any():
        rates = rate * 2.0 ** -np.arange(_HALVINGS)[:, None]
        device, host = np.concatenate([device, rates]), np.concatenate([host, 0 * rates])
    longer = np.empty((len(device), *both.shape[1:]))
    back = np.empty_like(longer) if (forward[1:] > forward[0]).any() else longer[:0]
    away = np.flatnonzero(parked.any(axis=(1, 2)))
    paid, sums = np.empty_like(kept), np.empty_like(kept)
    for i, (x, y) in enumerate(zip(device, host, strict=True)):
        np.multiply(kept, x, out=paid)
        if y.any():
            paid[away] += y * parked[away]
        longer[i] = np.add(paid, both, out=sums).min(axis=0) - both[0]
        if len(back):
            back[i] = np.add(paid, backward, out=sums).min(axis=0) - backward[0]
    longest = (both - both[0]).max(axis=0)
    return Relaxed(device, host, longer, back, longest + _ROUNDING * (longest + both[0]), usual)


def _prices(seconds: Array, kept: Array, parked: Array) -> tuple[Array, Array]:
    """Return (price, choice) on the device and on the host, from (mode, choice) of all layers.

    At such a price, two modes of the lower hull of seconds over bytes cost the same. If the host is full too, its price
    makes an offloading mode no better than two others.
    """
    scale = 1 / np.maximum(seconds[:1], 1e-30), 1 / np.maximum(kept[:1], 1.0)
    usual = (seconds * scale[0]).mean(axis=1), (kept * scale[1]).mean(axis=1)  # modes of a typical choice
    away = np.flatnonzero((parked > 0).any(axis=1))
    dear = _DEAR * seconds[0] * scale[1][0]
    found = [(dear, 0 * dear)]
    for one, other in pairwise(hull(*usual)):
        found.append((_slope(seconds, kept, one, other), 0 * dear))
    if len(away):
        found.append((dear, dear))
        staying = np.flatnonzero(~(parked > 0).any(axis=1))
        for one, other in pairwise(staying[hull(usual[0][staying], usual[1][staying])].tolist()):
            price = _slope(seconds, kept, one, other)
            gain = seconds[one] + price * kept[one] - seconds[away] - price * kept[away]
            found.append((price, np.maximum(gain / np.maximum(parked[away], 1.0), 0.0).max(axis=0)))
    return np.stack([price for price, _ in found]), np.stack([price for _, price in found])


def _slope(seconds: Array, kept: Array, one: int, other: int) -> Array:
    """Return (choice,): seconds per byte, from one mode to another that keeps less."""
    return np.maximum(seconds[other] - seconds[one], 0.0) / np.maximum(kept[one] - kept[other], 1.0)
