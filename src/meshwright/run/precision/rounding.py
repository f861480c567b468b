"""What a coarser type would do to the numbers of a product: how many it loses, and how far it moves the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.run.precision.matmul import BACKWARD, FORWARD, scaled

# Of inputs, weights and gradients, in every type that rounds.
_TYPES = {"fp8": (FORWARD, FORWARD, BACKWARD), "bf16": (torch.bfloat16,) * 3}
SUMS = 4  # of a tensor: values lost, values that are not zero, squares of differences, squares of values


@dataclass(frozen=True)
class Rounding:
    """Of the worst of a product's inputs, weights and gradients."""

    lost: float = 0.0  # share of the values that are not zero and become zero
    error: float = (
        0.0  # norm of the difference over the norm, in units of the type's epsilon: about 0.2 if none is lost
    )

    @staticmethod
    def of(sums: Tensor, kind: str) -> Rounding:
        """From sums over all processes, of (inputs, weights, gradients); what is not finite is as bad as can be."""
        found = []
        for (lost, values, wrong, size), rounded in zip(sums.tolist(), _TYPES[kind], strict=True):
            error = (wrong / size) ** 0.5 / torch.finfo(rounded).eps if size else 0.0
            found.append((lost / max(values, 1.0), error if error < torch.inf else torch.inf))
        return Rounding(max(lost for lost, _ in found), max(error for _, error in found))


@torch.no_grad()
def rounded(x: Tensor, kind: torch.dtype) -> Tensor:
    """The four sums of one tensor, in float64.

    >>> rounded(torch.tensor([1.0, 0.0, 1e-9]), torch.float8_e4m3fn)[:2]
    tensor([1., 2.], dtype=torch.float64)
    """
    wide = x.float()
    if kind in (FORWARD, BACKWARD):
        values, scale = scaled(wide, kind)
        back = values.float() * scale
    else:
        back = wide.to(kind).float()
    # Squares of small gradients would vanish: they are taken of parts of the largest value.
    most = wide.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    squares = torch.stack([((wide - back) / most).square().sum(), (wide / most).square().sum()]).double()
    counts = torch.stack([((back == 0) & (wide != 0)).sum(), (wide != 0).sum()])
    return torch.cat([counts.double(), squares * most.double() ** 2])


class Watch:
    """Adds up what some types would do to the inputs, weights and gradients of one product."""

    def __init__(self, kinds: tuple[str, ...], device: torch.device) -> None:
        self.kinds = kinds
        self.sums = torch.zeros(len(kinds), 3, SUMS, dtype=torch.float64, device=device)

    def saw(self, x: Tensor, weight: Tensor, product: Tensor) -> None:
        """The gradient comes later."""
        self._add(0, x)
        self._add(1, weight)
        product.register_hook(lambda grad: self._add(2, grad))

    def _add(self, which: int, x: Tensor) -> None:
        for sums, kind in zip(self.sums, self.kinds, strict=True):
            sums[which] += rounded(x.detach(), _TYPES[kind][which])
