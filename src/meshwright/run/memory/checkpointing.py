"""Activation checkpointing: operators that are recomputed in the backward pass instead of keeping their outputs.

A layer runs its operators by name. The output of a recomputed operator is passed on as usual. If a later operator would
save it for the backward pass, a reference to its origin is saved instead. Before it is needed there, the operator is
recomputed from inputs that were kept, or that are recomputed first. Nothing else of a recomputed operator is kept, so
any set of names works, and memory falls by what the cost model counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# run(name, function, *tensors): returns the function's result for them. `part`: the module of its weights, if that is a
# part of the layer that ZeRO gathers separately.
Run = Callable[..., Any]


def plainly(name: str, function: Callable[..., Any], *inputs: Tensor, part: nn.Module | None = None) -> Any:
    """Run an operator and keep all that autograd saves."""
    return function(*inputs)


@dataclass(frozen=True)
class View:
    """Position of a tensor in its storage: shape, strides and offset."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> View:
        return View(tensor.size(), tensor.stride(), tensor.storage_offset())

    def on(self, base: Tensor) -> Tensor:
        return base.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _Made:
    """Saved tensor of a recomputed operator: a part of an output, or a tensor that its own functions save."""

    by: _Repeated
    index: int
    inside: bool
    view: View

    def tensor(self) -> Tensor:
        return self.by.made(self.index, inside=self.inside, view=self.view)


def storage(tensor: Tensor) -> int:
    """Return the address of the storage that a tensor is a view of."""
    return int(tensor.untyped_storage().data_ptr())


def _tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [one for one in found if isinstance(one, Tensor)]


class _Repeated:
    """One run of an operator, which can be recomputed."""

    def __init__(
        self, layer: _Operators, function: Callable[..., Any], inputs: tuple[Tensor, ...], part: nn.Module | None
    ) -> None:
        self.function, self.module, self.unpack, self.part = function, layer.module, layer.unpack, part
        self.kept = [layer.pack(one.detach()) for one in inputs]
        self.needs = [one.requires_grad for one in inputs]
        self.asked = self.left = 0  # references to its tensors; once all have been read, the results are released
        self.outputs: list[Tensor] = []
        self.saved: list[Tensor] = []

    def note(self, index: int, tensor: Tensor, *, inside: bool) -> _Made:
        self.asked += 1
        self.left += 1
        return _Made(self, index, inside, View.of(tensor))

    def made(self, index: int, *, inside: bool, view: View) -> Tensor:
        if not self.outputs:
            self._again()
        found = self.saved[index] if inside else view.on(self.outputs[index])
        self.left -= 1
        if not self.left:
            self.left, self.outputs, self.saved = self.asked, [], []
        return found

    def _again(self) -> None:
        inputs = [
            self.unpack(one).detach().requires_grad_(need) for one, need in zip(self.kept, self.needs, strict=True)
        ]
        if isinstance(self.part, FSDPModule):
            self.part.unshard()  # the backward pass has come to what follows the part, not to the part itself
        given = _given(self.module, inputs)
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> None:
            """Save nothing in this graph, which no backward pass uses.

            An operator that saves its own output would otherwise form a cycle that no collector sees.
            """
            if storage(tensor) not in given:
                saved.append(tensor.detach())

        with torch.enable_grad(), saved_tensors_hooks(pack, _never):
            outputs = _tensors(self.function(*inputs))
        self.outputs, self.saved = [one.detach() for one in outputs], saved


def _never(_: None) -> Tensor:
    raise AssertionError("a graph that only lists what an operator saves has no backward pass")


def _given(module: nn.Module, inputs: Iterable[Tensor]) -> set[int]:
    """Return storages that an operator does not create: those of its inputs, of parameters and of empty tensors.

    Parameters that are sharded while an operator runs are not its own: experts, which are gathered separately.
    """
    own = (one for one in module.parameters() if not isinstance(one, DTensor))
    return {0, *(storage(one) for one in (*inputs, *own))}


class Keeper:
    """Saver of tensors for the backward pass, which leaves them where they are."""

    def pack(self, tensor: Tensor) -> Any:
        """Return a substitute for a tensor in the graph, never the tensor itself.

        Some operators save their own output (softmax, rsqrt, attention), and node -> output -> node is a cycle in C++
        that no collector sees.
        """
        return tensor.detach()

    def unpack(self, kept: Any) -> Tensor:
        found: Tensor = kept
        return found


class _Operators:
    """Operators of one layer during one forward pass."""

    def __init__(self, module: nn.Module, names: frozenset[str], keeper: Keeper) -> None:
        self.module, self.names, self.keeper = module, names, keeper
        self.origin: dict[int, tuple[_Repeated, int]] = {}  # of a storage: its operator, and the index of the output
        self.alive: list[Tensor] = []  # keeps storages alive, so that none gets the address of another

    def pack(self, tensor: Tensor) -> Any:
        made = self.origin.get(storage(tensor))
        return made[0].note(made[1], tensor, inside=False) if made else self.keeper.pack(tensor)

    def unpack(self, kept: Any) -> Tensor:
        return kept.tensor() if isinstance(kept, _Made) else self.keeper.unpack(kept)

    def run(self, name: str, function: Callable[..., Any], *inputs: Tensor, part: nn.Module | None = None) -> Any:
        if name not in self.names:
            return function(*inputs)
        frame, given, count = _Repeated(self, function, inputs, part), _given(self.module, inputs), 0

        def pack(tensor: Tensor) -> Any:
            nonlocal count
            if storage(tensor) in given:
                return self.pack(tensor)
            count += 1
            return frame.note(count - 1, tensor, inside=True)

        with saved_tensors_hooks(pack, self.unpack):
            found = function(*inputs)
        for index, output in enumerate(_tensors(found)):
            if storage(output) not in given:
                self.origin.setdefault(storage(output), (frame, index))
                self.alive.append(output.detach())
        return found


@contextmanager
def operators(layer: nn.Module) -> Iterator[Run]:
    """Run the operators of a layer; those named in its `repeated` are recomputed in the backward pass.

    >>> layer = nn.Module()
    >>> layer.repeated, layer.keeper = frozenset({"square"}), None
    >>> x = torch.ones(3, requires_grad=True)
    >>> with operators(layer) as run:
    ...     y = run("cube", lambda t: t * t * t, run("square", lambda t: t * t, x))
    >>> y.sum().backward()
    >>> x.grad
    tensor([6., 6., 6.])
    """
    names, keeper = layer.repeated, layer.keeper
    if not (names or keeper) or not torch.is_grad_enabled():
        yield plainly
        return
    found = _Operators(layer, names, keeper or Keeper())
    try:
        with saved_tensors_hooks(found.pack, found.unpack):
            yield found.run
    finally:  # autograd keeps the hooks alive, and through them all this
        found.origin.clear()
        found.alive.clear()
