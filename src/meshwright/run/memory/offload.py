"""Activations that are offloaded to host memory, or swapped to another device, between the passes.

A layer's saved tensors go through its `Keeper`. A share of them, by bytes, is copied on a stream of its own while later
layers run. They are copied back while the layer after it is in its backward pass. Parameters and tensors too small to
be worth a copy stay. On a CPU only the copies happen: values are the same to the last bit.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.run.memory.checkpointing import Keeper, View
from meshwright.run.memory.checkpointing import storage as storage_of
from meshwright.run.memory.offload_share import OffloadShare
from meshwright.run.torch_private import StorageWeakRef

if TYPE_CHECKING:
    from meshwright.run.models import Decoder

LEAST = 2**20  # minimum bytes of a tensor that is worth a copy
_UNDER_WAY = 2**30  # maximum bytes in transfer: beyond it the host waits, or no memory would be saved


@dataclass(frozen=True)
class Place:
    """Target of a share of a span's activations: `cpu`, or another device."""

    device: str
    share: OffloadShare


def offload(
    decoder: Decoder, places: Sequence[Place], layers: Collection[str] | None = None, moves: Moves | None = None
) -> None:
    """Make the blocks of a decoder offload a share of their activations; for recomputed blocks that is their input.

    If `layers` are named, only those; then all share `moves`, so that copies of one overlap with another's work.

    >>> from meshwright.models import Model
    >>> from meshwright.run.models import build
    >>> decoder = build(Model.preset("tiny-llama"))
    >>> offload(decoder, [Place("cpu", OffloadShare(1.0))])
    >>> type(decoder.layer("block.0.mlp").keeper).__name__
    'Elsewhere'
    """
    moves = moves or Moves()
    repeated = {name for names in decoder.whole.values() for name in names}
    for name in decoder.names if layers is None else layers:
        if name in decoder.whole:
            decoder.keepers[name] = Elsewhere(moves, places)
        elif name not in repeated and hasattr(decoder.layer(name), "keeper"):
            decoder.layer(name).keeper = Elsewhere(moves, places, decoder.layer(name))


class Elsewhere(Keeper):
    """Keeper that offloads a layer's saved tensors, or the inputs of recomputed blocks."""

    def __init__(self, moves: Moves, places: Sequence[Place], layer: nn.Module | None = None) -> None:
        self._moves, self.places = moves, places
        self._layer = None if layer is None else weakref.ref(layer)

    def pack(self, tensor: Tensor) -> Any:
        layer = self._layer() if self._layer else None
        # Sharded weights cannot be among the saved tensors.
        here = [weight for weight in layer.parameters() if not isinstance(weight, DTensor)] if layer else []
        given = set(map(storage_of, here))
        if tensor.untyped_storage().nbytes() < LEAST or storage_of(tensor) in given:
            return super().pack(tensor)
        parked = self._moves.parked(tensor, self)
        return super().pack(tensor) if parked is None else (parked, tensor.dtype, View.of(tensor))

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        parked, dtype, view = kept
        found: Tensor = view.on(parked.here().view(dtype))
        return found


class _Batch:
    """Tensors that one run of one layer has offloaded; fetched together, while the batch before them is in transfer."""

    def __init__(self, of: Keeper, before: _Batch | None) -> None:
        self.of, self.asked = of, False
        self._before = None if before is None else weakref.ref(before)
        self._parked: list[weakref.ref[Parked]] = []

    def add(self, parked: Parked) -> None:
        self._parked.append(weakref.ref(parked))

    def fetch(self, *, ahead: bool) -> None:
        for each in self._parked:
            parked = each()
            if parked is not None:
                parked.fetch()
        before = self._before() if self._before else None
        if ahead and before is not None:
            before.fetch(ahead=False)


class Moves:
    """Copies of one decoder, shared by its layers."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._under_way: deque[Parked] = deque()
        self._known: dict[int, tuple[Any, weakref.ref[Parked] | None]] = {}  # by address, for storages that are alive
        self._batch: weakref.ref[_Batch] | None = None

    def parked(self, tensor: Tensor, keeper: Elsewhere) -> Parked | None:
        """Return the offloaded storage of a tensor, or None if it stays. Several views of a storage are copied once."""
        storage = tensor.untyped_storage()
        known = self._known.get(storage_of(tensor))
        if known is not None and not known[0].expired():
            return known[1]() if known[1] else None
        place = next((place for place in keeper.places if place.share.takes(storage.nbytes())), None)
        found = None if place is None else self._park(tensor, place, keeper)
        self._known = {at: one for at, one in self._known.items() if not one[0].expired()}
        self._known[storage_of(tensor)] = (StorageWeakRef(storage), weakref.ref(found) if found else None)
        return found

    def _park(self, tensor: Tensor, place: Place, keeper: Keeper) -> Parked:
        if tensor.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream()
        batch = self._batch() if self._batch else None
        if batch is None or batch.of is not keeper or batch.asked:
            batch = _Batch(keeper, batch)
            self._batch = weakref.ref(batch)
        found = Parked(tensor, place.device, self._stream, batch)
        if tensor.is_cuda:
            self._under_way.append(found)
            while self._under_way and (self._under_way[0].gone or self._bytes() > _UNDER_WAY):
                self._under_way.popleft().let_go()
        return found

    def _bytes(self) -> int:
        return sum(one.bytes for one in self._under_way)


class Parked:
    """Offloaded storage, which is fetched when it is needed."""

    def __init__(self, tensor: Tensor, device: str, stream: torch.cuda.Stream | None, batch: _Batch) -> None:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self.bytes, self.batch = whole.numel(), batch
        self._stream, self._home = stream, whole.device
        self._back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        if stream is None:
            self._away = whole.clone()
        else:
            self._away = torch.empty_like(whole, device=device, pin_memory=device == "cpu")
            self._left: Tensor | None = whole  # its memory is used until the copy is complete
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._away.copy_(whole, non_blocking=True)
                self._sent = stream.record_event()
        batch.add(self)

    @property
    def gone(self) -> bool:
        """Return True if the copy is complete."""
        return bool(self._sent.query())

    def let_go(self) -> None:
        """Free the device memory once the copy is complete."""
        self._sent.synchronize()
        self._left = None

    def fetch(self) -> None:
        """Start the copy back."""
        if self._stream is None or self._back is not None:
            return
        if self._left is not None:  # the copy out has not finished
            self._back = self._left
            return
        self._back = torch.empty_like(self._away, device=self._home)
        self._stream.wait_stream(torch.cuda.current_stream())  # its earlier work may still use that memory
        with torch.cuda.stream(self._stream):
            self._back.copy_(self._away, non_blocking=True)
            self._arrived = self._stream.record_event()
        self._back.record_stream(self._stream)

    def here(self) -> Tensor:
        """Return the bytes, on the device that they came from."""
        if self._stream is None:
            return self._away
        self.batch.asked = True
        self.batch.fetch(ahead=True)
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
        assert self._back is not None
        return self._back
