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
    swapped_in: int  # activations that other stages park here
    working: int  # one block while it runs: gathered or fetched weights, recomputed activations
    host: int  # what is offloaded, in the node's memory
    host_capacity: int  # the device's part of the node's memory

    @property
    def total(self) -> int:
        """Bytes on the device."""
        on_device = (self.parameters, self.gradients, self.optimizer, self.activations, self.swapped_in, self.working)
        return sum(on_device)

    @property
    def short_by(self) -> int:
        """Bytes that are missing on the device; 0 when it fits."""
        return max(self.total - self.capacity, 0)

    @property
    def host_short_by(self) -> int:
        """Bytes that are missing on the host; 0 when it fits."""
        return max(self.host - self.host_capacity, 0)
