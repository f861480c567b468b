"""Norms by the names that the cost model uses."""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.run.kernels import rms_norm, rms_norm_beside
from meshwright.run.mesh.mesh import SpanMesh
from meshwright.run.models.numerics import Numerics


class RMSNorm(nn.RMSNorm):
    """RMS norm: one kernel on accelerators."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm, and its input for the residual stream."""
        return rms_norm_beside(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """Layer norm with the same interface."""

    def beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm, and its input for the residual stream."""
        return self(x), x


def norm(kind: str, width: int, numerics: Numerics) -> RMSNorm | LayerNorm:
    """Return a norm of kind `rms` or `layer`."""
    return RMSNorm(width, eps=numerics.eps) if kind == "rms" else LayerNorm(width, eps=numerics.eps)


def entered(norm: RMSNorm | LayerNorm, x: Tensor, mesh: SpanMesh, *, later: bool = False) -> tuple[Tensor, Tensor]:
    """Return the norm of x on all ranks of a tensor-parallel group, and x for the residual stream.

    With `later`, the next product gathers the norm instead.
    """
    normed, x = norm.beside(x)
    return normed if later else mesh.enter(normed), x
