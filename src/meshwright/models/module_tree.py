"""Find the places where a `torch.nn.Module` can be cut into a chain, from its module tree and one traced call.

A list of modules of one class is a list of blocks if each takes the output of the one before. A pipeline can be cut
there. A block is opened only if it is itself such a chain (the stages of Swin or ResNet). Modules before, between and
after the blocks become links of their own. Pieces that do not feed one another stay together in one link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_flatten


@dataclass(frozen=True, slots=True)
class Call:
    """The n-th call of a module (tied modules are called more than once)."""

    module: str
    number: int


@dataclass(frozen=True, slots=True)
class Link:
    """One link of the chain: calls that stay together."""

    name: str
    calls: tuple[Call, ...]
    parameters: int  # trained, first used by this link
    frozen: int
    tied: int  # trained parameters it shares with an earlier link,
    tied_frozen: int  # frozen ones,
    tied_to: str  # and that link
    crossing: int  # elements that this link or an earlier one made and a later one reads
    block: str


@dataclass
class Seen:
    """Storages that went in and out of one call, with their elements."""

    call: Call
    inputs: list[int]
    outputs: list[int] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)

    def feeds(self, other: Seen) -> bool:
        return bool(set(other.inputs[:1]) & set(self.outputs))


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return every tensor in nested containers, dataclasses and `ModelOutput`s."""
    leaves, _ = tree_flatten(tree)
    found: list[torch.Tensor] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "values") and callable(leaf.values):
            found += tensors_of(list(leaf.values()))
    return found


def identity(tensor: torch.Tensor) -> int:
    """Return a key that is equal for tensors that share memory, while both live."""
    return int(tensor.untyped_storage()._cdata)


def find_links(module: torch.nn.Module, call: Callable[[], Any]) -> list[Link]:
    """Run `call` once under hooks and cut the module where its data flow is a chain."""
    seen = _watch(module, call)
    flow: dict[str, Seen] = {}
    for item in seen:
        flow.setdefault(item.call.module, item)
    cuts = dict(_expand("", module, flow, inside_block=False))
    blocks = {path for path, is_block in cuts.items() if is_block}
    return _links(module, _join(module, [item for item in seen if item.call.module in cuts], blocks))


def _watch(module: torch.nn.Module, call: Callable[[], Any]) -> list[Seen]:
    """Return every module call in the order of entry."""
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
            item = Seen(Call(path, number), [identity(t) for t in tensors])
            seen.append(item)
            stack.append(item)

        return hook

    def leave(_: Any, __: Any, output: Any) -> None:
        tensors = tensors_of(output)
        alive.extend(tensors)
        item = stack.pop()
        item.outputs = [identity(t) for t in tensors]
        item.sizes = {identity(t): t.numel() for t in tensors if t.is_floating_point()}

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


_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def _children(path: str, module: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    return [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]


def _expand(path: str, module: torch.nn.Module, flow: dict[str, Seen], inside_block: bool) -> list[tuple[str, bool]]:
    """Return the paths of the modules that become links, below `path`, and whether each is a block."""
    listed = isinstance(module, _LISTS)
    if not listed and path not in flow and path:
        return []
    children = _children(path, module)
    if not children or (inside_block and not _is_chain(path, module, flow)):
        return [(path, inside_block)]
    if not listed and not inside_block and not _holds_blocks(path, module, flow):
        return [(path, False)]
    blocks = inside_block or _is_block_list(path, module, flow)
    return [cut for child_path, child in children for cut in _expand(child_path, child, flow, blocks)]


def _called(path: str, module: torch.nn.Module, flow: dict[str, Seen]) -> list[Seen]:
    """Return the calls directly below a module; lists are transparent."""
    found = []
    for child_path, child in _children(path, module):
        if isinstance(child, _LISTS):
            found += _called(child_path, child, flow)
        elif child_path in flow:
            found.append(flow[child_path])
    return found


def _fed_in_turn(calls: list[Seen]) -> bool:
    return all(before.feeds(after) for before, after in pairwise(calls))


def _has_parameters(module: torch.nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_block_list(path: str, module: torch.nn.Module, flow: dict[str, Seen]) -> bool:
    """Return True for a list of at least two modules of one class, each fed by the one before it."""
    if not isinstance(module, (*_LISTS, torch.nn.Sequential)):
        return False
    classes = [type(child) for child in module.children() if _has_parameters(child)]
    calls = _called(path, module, flow)
    repeated = len(classes) >= 2 and len(set(classes)) < len(classes)
    return repeated and len(calls) >= 2 and _fed_in_turn(calls)


def _holds_blocks(path: str, module: torch.nn.Module, flow: dict[str, Seen]) -> bool:
    if _is_block_list(path, module, flow):
        return True
    return any(_holds_blocks(child_path, child, flow) for child_path, child in _children(path, module))


def _is_chain(path: str, module: torch.nn.Module, flow: dict[str, Seen]) -> bool:
    """Return True if a block is only its children in turn: no residual around them, no glue between."""
    if isinstance(module, _LISTS):
        return True
    calls = _called(path, module, flow)
    if len(calls) < 2 or path not in flow or not _holds_blocks(path, module, flow):
        return False
    whole = flow[path]
    begins = bool(set(calls[0].inputs[:1]) & set(whole.inputs[:1]))
    ends = bool(set(calls[-1].outputs) & set(whole.outputs[:1]))
    return begins and ends and _fed_in_turn(calls)


def _join(module: torch.nn.Module, order: list[Seen], blocks: set[str]) -> list[list[Seen]]:
    """Return calls in order, grouped.

    A block opens a group. Any other call joins the group before it, unless that feeds it and it holds weights of its
    own.
    """
    modules = dict(module.named_modules())
    groups: list[list[Seen]] = []
    for item in order:
        fed = bool(groups) and any(set(item.inputs) & set(before.outputs) for before in groups[-1])
        own = _has_parameters(modules[item.call.module])
        if groups and not (own and (fed or item.call.module in blocks)):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _links(module: torch.nn.Module, groups: list[list[Seen]]) -> list[Link]:
    """Name the groups, give each parameter to the first user, and find the tensors that cross between them."""
    modules = dict(module.named_modules())
    owner: dict[int, int] = {}
    used: list[dict[int, torch.nn.Parameter]] = []
    for index, group in enumerate(groups):
        mine = {id(p): p for item in group for p in modules[item.call.module].parameters()}
        for key in mine:
            owner.setdefault(key, index)
        used.append(mine)
    for parameter in module.parameters():  # held by a module that is only glue: goes to the first link
        if id(parameter) not in owner:
            owner[id(parameter)] = 0
            used[0][id(parameter)] = parameter
    names = _names(groups)
    links = []
    for index, group in enumerate(groups):
        own = [p for key, p in used[index].items() if owner[key] == index]
        shared = {key: p for key, p in used[index].items() if owner[key] != index}
        path = group[0].call.module
        link = Link(
            name=names[index],
            calls=tuple(item.call for item in group),
            parameters=sum(p.numel() for p in own if p.requires_grad),
            frozen=sum(p.numel() for p in own if not p.requires_grad),
            tied=sum(p.numel() for p in shared.values() if p.requires_grad),
            tied_frozen=sum(p.numel() for p in shared.values() if not p.requires_grad),
            tied_to=names[owner[next(iter(shared))]] if shared else "",
            crossing=_crossing(groups, index),
            block=path if path.rsplit(".", 1)[-1].isdigit() else "",
        )
        links.append(link)
    return links


def _crossing(groups: list[list[Seen]], index: int) -> int:
    """Return the elements of tensors made up to this link and read after it; for the last link, of its output."""
    made = {key: size for group in groups[: index + 1] for item in group for key, size in item.sizes.items()}
    taken = {key for group in groups[index + 1 :] for item in group for key in item.inputs}
    crossing = sum(size for key, size in made.items() if key in taken)
    # Hooks miss tensors made by glue between two links; the link's own output then replaces them.
    return crossing or next(iter(groups[index][-1].sizes.values()), 0)


def _names(groups: list[list[Seen]]) -> list[str]:
    names: list[str] = []
    for group in groups:
        name = group[0].call.module or "module"
        names.append(f"{name}.{group[0].call.number + 1}" if name in names else name)
    return names
