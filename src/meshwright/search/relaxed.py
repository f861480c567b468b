"""What memory costs at least: bytes get a price, and every layer takes the mode that is then cheapest.

Lagrangian relaxation. Of a group of devices that keeps `a` micro-batches, whatever modes its layers take,

    seconds >= sum over layers of min over modes (seconds + x kept + y parked) - x D / a - y H / a

for any prices x, y >= 0 in seconds per byte of one micro-batch, D and H being the bytes that device and host have for
activations. The best of a few prices is a bound close to the truth; it holds for layers of any sorts in any mixture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
_DEAR = 1e3  # times what all layers take, for all that they keep: a price that only shows whether the bytes fit


@dataclass(frozen=True)
class Relaxed:
    """Arrays of (price, choice), or (price, sort, choice)."""

    device: Array  # seconds per byte of one micro-batch
    host: Array
    longer: Array  # seconds that a layer takes more at least, what it keeps and parks paid for
    longer_back: Array  # the same of its backward pass only; nothing (no prices) where no mode slows the forward pass

    def take(self, rows: Array) -> Relaxed:
        """Of some of the choices."""
        return Relaxed(*(part[..., rows] for part in (self.device, self.host, self.longer, self.longer_back)))


def relaxed(every: Array, forward: Array, backward: Array, kept: Array, parked: Array) -> Relaxed:
    """From seconds and bytes of (mode, sort, choice); `every`: layers of each sort in the model."""
    both = forward + backward
    device, host = _prices(*(np.einsum("s,rsc->rc", every, part) for part in (both, kept, parked)))
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
    return Relaxed(device, host, longer, back)


def _prices(seconds: Array, kept: Array, parked: Array) -> tuple[Array, Array]:
    """(price, choice) on the device and on the host, from (mode, choice) of all layers.

    Where two modes of the lower hull of seconds over bytes cost the same; and, where the host is full too, what its
    bytes must cost for a mode that parks to be no better than those two.
    """
    scale = 1 / np.maximum(seconds[:1], 1e-30), 1 / np.maximum(kept[:1], 1.0)
    usual = (seconds * scale[0]).mean(axis=1), (kept * scale[1]).mean(axis=1)  # modes of a choice like most
    staying = np.flatnonzero(~(parked > 0).any(axis=1))
    away = np.flatnonzero((parked > 0).any(axis=1))
    dear = _DEAR * seconds[0] * scale[1][0]
    device, host = [dear], [0 * dear]
    for one, other in _hull(*usual, np.arange(len(seconds))) if len(away) else []:
        device.append(_slope(seconds, kept, one, other))
        host.append(0 * dear)
    for one, other in _hull(*usual, staying):
        price = _slope(seconds, kept, one, other)
        device.append(price)
        host.append(0 * dear)
        if len(away):
            gain = seconds[one] + price * kept[one] - seconds[away] - price * kept[away]
            device.append(price)
            host.append(np.maximum(gain / np.maximum(parked[away], 1.0), 0.0).max(axis=0))
    if len(away):
        device.append(dear)
        host.append(dear)
    return np.stack(device), np.stack(host)


def _slope(seconds: Array, kept: Array, one: int, other: int) -> Array:
    """(choice,): seconds per byte, from one mode to another that keeps less."""
    return np.maximum(seconds[other] - seconds[one], 0.0) / np.maximum(kept[one] - kept[other], 1.0)


def _hull(seconds: Array, kept: Array, modes: Array) -> list[tuple[int, int]]:
    """Neighbours on the lower hull of seconds over bytes, from the fastest on."""
    at = min(modes.tolist(), key=lambda r: (seconds[r], kept[r]))
    found = []
    while len(left := [r for r in modes.tolist() if kept[r] < kept[at] * (1 - 1e-9)]):
        following = min(left, key=lambda r: ((seconds[r] - seconds[at]) / (kept[at] - kept[r]), kept[r]))
        found.append((at, following))
        at = following
    return found
