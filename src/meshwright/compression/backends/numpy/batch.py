"""Batches without a compiler: NumPy in float32."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meshwright.compression.backends.numpy.reference import Array, decoded, encoded, measured
from meshwright.compression.batch import Batch


class PortableBatch(Batch):
    """Batch of gradients that are encoded one after the other."""

    def measure(self, flat: Tensor, *, residual: Tensor | None = None) -> None:
        self.check(None, flat, residual)
        for i, part in enumerate(self._parts(flat)):
            self.agreed[i] = measured(self.program, part, self._part(residual, i), np.float32)

    def encode(
        self, flat: Tensor, message: Tensor, *, residual: Tensor | None = None, seed: int = 0, agreed: bool = False
    ) -> None:
        self.check(message, flat, residual)
        if not agreed:
            self.measure(flat, residual=residual)
        for i, part in enumerate(self._parts(flat)):
            kept = self._part(residual, i)
            scale = float(self.agreed[i])
            said, left = encoded(self.program, part, residual=kept, seed=seed, agreed=scale, real=np.float32)
            message[self.places[i] : self.places[i + 1]] = torch.from_numpy(said)
            if kept is not None and left is not None:
                kept[:] = left

    def decode(self, message: Tensor, out: Tensor, *, add: bool = False) -> None:
        self.check(message, out, out=True)
        for i, count in enumerate(self.counts):
            said = message[self.places[i] : self.places[i + 1]].numpy()
            value = torch.from_numpy(decoded(self.program, said, count, agreed=float(self.agreed[i]), real=np.float32))
            here = out[self.starts[i] : self.starts[i + 1]]
            here.copy_(here.float() + value if add else value)

    def _parts(self, flat: Tensor) -> list[Array]:
        return [part.float().numpy() for part in flat.detach().split(list(self.counts))]

    def _part(self, residual: Tensor | None, i: int) -> Array | None:
        return None if residual is None else residual[self.starts[i] : self.starts[i + 1]].numpy()
