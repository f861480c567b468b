"""Rounding error of a product in a coarser type: the values it loses, and the distance of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.run.precision.matmul import BACKWARD, FORWARD, scaled

# For inputs, weights and gradients, in every type that rounds.
_TYPES = {"fp8": (FORWARD, FORWARD, BACKWARD), "bf16": (torch.bfloat16,) * 3}
SUMS = 4  # per tensor: values lost, nonzero values, squares of differences, squares of values


@dataclass(frozen=True)
class Rounding:
    """Rounding error of the worst of a product's inputs, weights and gradients."""

    lost: float = 0.0  # share of the nonzero values that become zero
    error: float = (
        0.0  # norm of the difference over the norm, in units of the type's epsilon: about 0.2 if none is lost
    )

    @staticmethod
    def of(sums: Tensor, kind: str) -> Rounding:
        """Return the error from sums over all ranks, for (inputs, weights, gradients); NaN counts as worst."""
        found = []
        for (lost, values, wrong, size), rounded in zip(sums.tolist(), _TYPES[kind], strict=True):
            error = (wrong / size) ** 0.5 / torch.finfo(rounded).eps if size else 0.0
            found.append((lost / max(values, 1.0), error if error < torch.inf else torch.inf))
        return Rounding(max(lost for lost, _ in found), max(error for _, error in found))


@torch.no_grad()
def rounded(x: Tensor, kind: torch.dtype) -> Tensor:
    """Return the four sums of one tensor, in float64.

    >>> rounded(torch.tensor([1.0, 0.0, 1e-9]), torch.float8_e4m3fn)[:2]
    tensor([1., 2.], dtype=torch.float64)
    """
    wide = x.float()
    if kind in (FORWARD, BACKWARD):
        values, scale = scaled(wide, kind)
        back = values.float() * scale
    else:
        back = wide.to(kind).float()
    # Squares of small gradients would underflow: they are taken relative to the largest value.
    most = wide.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    squares = torch.stack([((wide - back) / most).square().sum(), (wide / most).square().sum()]).double()
    counts = torch.stack([((back == 0) & (wide != 0)).sum(), (wide != 0).sum()])
    return torch.cat([counts.double(), squares * most.double() ** 2])


class Watch:
    """Sums of rounding errors for several types, over the inputs, weights and gradients of one product."""

    def __init__(self, kinds: tuple[str, ...], device: torch.device) -> None:
        self.kinds = kinds
        self.sums = torch.zeros(len(kinds), 3, SUMS, dtype=torch.float64, device=device)

    def saw(self, x: Tensor, weight: Tensor, product: Tensor) -> None:
        """Add one product; its gradient is added in the backward pass."""
        self._add(0, x)
        self._add(1, weight)
        product.register_hook(lambda grad: self._add(2, grad))

    def _add(self, which: int, x: Tensor) -> None:
        for sums, kind in zip(self.sums, self.kinds, strict=True):
            sums[which] += rounded(x.detach(), _TYPES[kind][which])
