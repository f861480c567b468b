"""What a plan costs, as the plan document stores it; `cost/` computes it."""

from __future__ import annotations

from meshwright.base.tables import Table

# What fills a device's memory, with a letter and a colour for pictures. Dark enough for white letters, and apart for
# colour-blind readers.
MEMORY_PARTS = (
    ("parameters", "p", "#3b6ea8"),
    ("gradients", "g", "#2a8b8b"),
    ("optimizer", "o", "#3a7d44"),
    ("activations", "a", "#c4622d"),
    ("swapped_in", "s", "#7d7a2c"),
    ("working", "w", "#8e4585"),
    ("communication", "c", "#a83b3b"),
    ("fragmentation", "f", "#6b6b6b"),
    ("context", "x", "#4a5260"),
)


class StageMemory(Table, frozen=True, kw_only=True):
    """Bytes on the fullest device of one device group, by what they hold."""

    devices: str
    capacity: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    swapped_in: int  # activations that other stages park here
    working: int  # the fullest moment of a block: recomputed activations, gradients of activations, the loss
    communication: int  # gathered weights and inputs, gradients before they are sharded
    fragmentation: int  # what the allocator reserves and cannot use
    context: int  # the driver, kernels and communicators of a process; on processors, the process itself
    host: int  # what is offloaded, in the node's memory
    host_capacity: int  # the device's part of the node's memory

    @property
    def total(self) -> int:
        """Bytes taken on the device, as a driver's tool shows them."""
        return self.reserved + self.context

    @property
    def allocated(self) -> int:
        """Bytes of tensors, as torch.cuda.max_memory_allocated counts them."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.swapped_in + self.working + self.communication

    @property
    def reserved(self) -> int:
        """Bytes the allocator holds, as torch.cuda.max_memory_reserved counts them."""
        return self.allocated + self.fragmentation

    @property
    def short_by(self) -> int:
        """Bytes that are missing on the device; 0 when it fits."""
        return max(self.total - self.capacity, 0)

    @property
    def host_short_by(self) -> int:
        """Bytes that are missing on the host; 0 when it fits."""
        return max(self.host - self.host_capacity, 0)
