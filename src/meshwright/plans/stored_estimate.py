"""Cost of a plan, as the plan document stores it; `cost/` computes it."""

from __future__ import annotations

from meshwright.base.tables import Table

# Parts of a device's memory, with a letter and a colour for pictures. Dark enough for white letters,
# and distinct for colour-blind readers.
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
    """Bytes on the fullest device of one device group, by purpose."""

    devices: str
    capacity: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    swapped_in: int  # activations of other stages swapped to this one
    working: int  # largest block: recomputed activations, gradients of activations, the loss
    communication: int  # gathered weights and inputs, gradients before they are sharded
    fragmentation: int  # reserved by the allocator but unusable
    context: int  # driver, kernels and communicators of a process; on CPUs, the process itself
    host: int  # offloaded, in the node's memory
    host_capacity: int  # the device's share of the node's memory

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
        """Bytes missing on the device; 0 when the plan fits."""
        return max(self.total - self.capacity, 0)

    @property
    def host_short_by(self) -> int:
        """Bytes missing on the host; 0 when the plan fits."""
        return max(self.host - self.host_capacity, 0)
