"""Loss scaling for float16 (Micikevicius et al., 2018): gradients are computed at a larger scale, then divided by it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class LossScale:
    """Loss scale: halved if a gradient overflows, whose step is skipped; doubled after many good steps.

    >>> scale = LossScale(8.0, every=2)
    >>> [scale.after(overflow) or scale.value for overflow in (True, False, False)]
    [4.0, 4.0, 8.0]
    """

    value: float = 65536.0
    every: int = 1000  # good steps until it doubles
    good: int = 0

    @staticmethod
    def of(dtype: torch.dtype) -> LossScale:
        """Return the scale of a type. Only float16 needs one: the exponent of bfloat16 is that of float32."""
        return LossScale() if dtype == torch.float16 else LossScale(1.0, every=2**62)

    def after(self, overflow: bool) -> None:
        """Update the scale after a step."""
        if overflow:
            self.value, self.good = max(self.value / 2, 1.0), 0
            return
        self.good += 1
        if self.good >= self.every:
            self.value, self.good = self.value * 2, 0
