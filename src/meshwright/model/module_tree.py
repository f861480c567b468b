"""Where a `torch.nn.Module` can be cut into a chain, found from its module tree and one traced call.

A list of modules of the same class in which each takes what the one before returned is a list of
blocks: that is where a pipeline can be cut. A block is opened up again only if it is itself nothing
but such a chain (the stages of Swin or ResNet). What stands before, between and after the blocks
becomes links of its own; pieces that do not feed one another stay together in one link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_flatten


@dataclass(frozen=True, slots=True)
class Call:
    """The n-th call of a module (tied modules are called more than once)."""

    module: str
    call: int


@dataclass(frozen=True, slots=True)
class Link:
    """One link of the chain: calls that stay together."""

    name: str
    calls: tuple[Call, ...]
    parameters: int
    block: str


@dataclass
class Seen:
    """What the hooks saw of one call."""

    call: Call
    depth: int
    inputs: list[int]
    outputs: list[int]


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Every tensor in a nest of containers, dataclasses and `ModelOutput`s included."""
    leaves, _ = tree_flatten(tree)
    found: list[torch.Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "values") and callable(leaf.values):
            found += tensors_of(list(leaf.values()))
    return found


def find_links(module: torch.nn.Module, call: Callable[[], Any]) -> list[Link]:
    """Run `call` once under hooks and cut the module where its data flow is a chain."""
    seen = _watch(module, call)
    flow: dict[str, Seen] = {}
    for item in seen:
        flow.setdefault(item.call.module, item)
    cuts = set(_expand("", module, flow, inside_block=False))
    order = [item for item in seen if item.call.module in cuts]
    return _join(module, order)


def _watch(module: torch.nn.Module, call: Callable[[], Any]) -> list[Seen]:
    """Every module call in the order of entry, with the identity of the storages that go in and out."""
    seen: list[Seen] = []
    stack: list[Seen] = []
    counts: dict[str, int] = {}
    alive: list[torch.Tensor] = []  # keeps storages alive, so that their identity stays unique
    handles = []

    def enter(path: str) -> Callable[..., None]:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            tensors = tensors_of((args, kwargs))
            alive.extend(tensors)
            number = counts.get(path, 0)
            counts[path] = number + 1
            item = Seen(Call(path, number), len(stack), [t.untyped_storage()._cdata for t in tensors], [])
            seen.append(item)
            stack.append(item)

        return hook

    def leave(_: Any, __: Any, output: Any) -> None:
        tensors = tensors_of(output)
        alive.extend(tensors)
        stack.pop().outputs = [t.untyped_storage()._cdata for t in tensors]

    for path, child in module.named_modules():
        handles.append(child.register_forward_pre_hook(enter(path), with_kwargs=True))
        handles.append(child.register_forward_hook(leave))
    try:
        with torch.no_grad():
            call()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _expand(path: str, module: torch.nn.Module, flow: dict[str, Seen], inside_block: bool) -> list[str]:
    """Paths of the modules that become links, below `path`."""
    listed = isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict)
    if not listed and path not in flow and path:
        return []
    children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    if not children:
        return [path]
    if inside_block and not _is_chain(path, module, flow):
        return [path]
    if not listed and not inside_block and not _holds_blocks(path, module, flow):
        return [path]
    found: list[str] = []
    for child_path, child in children:
        found += _expand(child_path, child, flow, inside_block or _is_block_list(path, module, flow))
    return found


def _called(path: str, module: torch.nn.Module, flow: dict[str, Seen]) -> list[Seen]:
    """The calls directly below a module; lists are transparent."""
    found = []
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            found += _called(child_path, child, flow)
        elif child_path in flow:
            found.append(flow[child_path])
    return found


def _fed_in_turn(calls: list[Seen]) -> bool:
    return all(set(after.inputs[:1]) & set(before.outputs) for before, after in pairwise(calls))


def _is_block_list(path: str, module: torch.nn.Module, flow: dict[str, Seen]) -> bool:
    """A list of at least two modules of one class, each fed by the one before it."""
    if not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.Sequential):
        return False
    classes = [type(child) for child in module.children() if any(True for _ in child.parameters())]
    calls = _called(path, module, flow)
    repeated = len(classes) >= 2 and len(set(classes)) < len(classes)
    return repeated and len(calls) >= 2 and _fed_in_turn(calls)


def _holds_blocks(path: str, module: torch.nn.Module, flow: dict[str, Seen]) -> bool:
    if _is_block_list(path, module, flow):
        return True
    return any(_holds_blocks(f"{path}.{n}" if path else n, c, flow) for n, c in module.named_children())


def _is_chain(path: str, module: torch.nn.Module, flow: dict[str, Seen]) -> bool:
    """Whether a block is nothing but its children in turn: no residual around them, no glue between."""
    if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
        return True
    calls = _called(path, module, flow)
    if len(calls) < 2 or path not in flow or not _holds_blocks(path, module, flow):
        return False
    whole = flow[path]
    begins = bool(set(calls[0].inputs[:1]) & set(whole.inputs[:1]))
    ends = bool(set(calls[-1].outputs) & set(whole.outputs[:1]))
    return begins and ends and _fed_in_turn(calls)


def _join(module: torch.nn.Module, order: list[Seen]) -> list[Link]:
    """Calls in order -> links; what is not fed by its predecessor, or holds no weights, joins it."""
    modules = dict(module.named_modules())
    groups: list[list[Seen]] = []
    counted: set[int] = set()
    own: dict[int, int] = {}
    for position, item in enumerate(order):
        new = [p for p in modules[item.call.module].parameters() if id(p) not in counted]
        counted |= {id(p) for p in new}
        own[position] = sum(p.numel() for p in new)
        fed = bool(groups) and any(set(item.inputs[:1]) & set(before.outputs) for before in groups[-1])
        if groups and (not fed or not any(True for _ in modules[item.call.module].parameters())):
            groups[-1].append(item)
        else:
            groups.append([item])
    held = {id(p) for p in module.parameters()}
    outside = sum(p.numel() for p in module.parameters() if id(p) in held - counted)
    links: list[Link] = []
    position = 0
    for index, group in enumerate(groups):
        count = sum(own[position + i] for i in range(len(group))) + (outside if index == 0 else 0)
        position += len(group)
        name = _name(group, {link.name for link in links})
        links.append(Link(name, tuple(item.call for item in group), count, _block(group[0].call.module)))
    return links


def _name(group: list[Seen], taken: set[str]) -> str:
    name = group[0].call.module or "module"
    if name in taken:
        name = f"{name}.{group[0].call.call + 1}"
    return name


def _block(path: str) -> str:
    """A path that ends in a number is an element of a list: a block."""
    return path if path.rsplit(".", 1)[-1].isdigit() else ""
