"""What a plan costs, as the plan document stores it; `cost/` computes it."""

from __future__ import annotations

from meshwright.tables import Table


class StageMemory(Table, frozen=True, kw_only=True):
    """Bytes on the fullest device of one device group, by what they hold."""

    devices: str
    capacity: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int  # one block while it runs: gathered ZeRO-3 weights, recomputed activations

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.working

    @property
    def short_by(self) -> int:
        """Bytes that are missing; 0 when it fits."""
        return max(self.total - self.capacity, 0)
