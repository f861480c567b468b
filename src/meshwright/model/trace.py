"""Any `torch.nn.Module` -> `Model`, traced with fake tensors over the meta device: nothing is allocated or computed.

FLOPs come from PyTorch's `FlopCounterMode`, saved activations from its saved-tensor hooks, layer
boundaries from the module tree (see `module_tree.py`). With a sequence dimension the trace is
repeated at three lengths, which fixes the quadratics that FLOPs and bytes are in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from meshwright.errors import InputError
from meshwright.model.chain import Model
from meshwright.model.layer import Kept, Layer, Op, Weight
from meshwright.model.module_tree import Link, find_links, tensors_of
from meshwright.model.written import write_model


@dataclass
class Counted:
    """What one link of the chain did in one trace."""

    flops: int = 0
    kept: dict[str, int] = field(default_factory=lambda: {"activation": 0, "fp32": 0, "byte": 0})
    output: int = 0


def traced_model(
    module: torch.nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any], *, name: str, seq_dim: int | None
) -> Model:
    """Trace `module(*inputs, **keywords)` and return its chain."""
    batch, longest = _sizes((inputs, keywords), seq_dim)
    lengths = [1] if seq_dim is None else _three_lengths(longest)
    links: list[Link] = []
    runs: list[dict[str, Counted]] = []
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            state = _stand_ins(module)
            for length in lengths:
                cut = partial(_stand_in, seq_dim=seq_dim, longest=longest, length=length)
                args, kwargs = tree_map(cut, (list(inputs), dict(keywords)))
                call = partial(_call, module, state, args, kwargs)
                links = links or find_links(module, call)
                runs.append(_count(module, links, state, call))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, DataDependentOutputException) as error:
        problem = f"{type(module).__name__} cannot be traced without its data: {error}"
        raise InputError(problem, field="from_module") from error
    layers = [_layer(link, [run[link.name] for run in runs], lengths, batch, i == 0) for i, link in enumerate(links)]
    layers = [_replace_input(layer, previous) for layer, previous in zip(layers, [None, *layers], strict=False)]
    label = name or type(module).__name__
    model = Model(label, "module", tuple(layers), 0 if seq_dim is None else longest, tokens=int(seq_dim is None))
    return replace(model, reference=write_model(model))


def _three_lengths(longest: int) -> list[int]:
    if longest < 8:
        raise InputError(f"the example's sequence has {longest} elements", field="seq_dim", valid="8 or more")
    return [longest // 4, longest // 2, longest]


def _sizes(example: Any, seq_dim: int | None) -> tuple[int, int]:
    """Batch and sequence length of the example inputs."""
    tensors = tensors_of(example)
    if not tensors or any(t.dim() == 0 for t in tensors):
        raise InputError("needs example input tensors with the batch as dimension 0", field="inputs")
    if seq_dim is None:
        return tensors[0].shape[0], 1
    with_sequence = [t for t in tensors if t.dim() > seq_dim]
    if not with_sequence:
        raise InputError(f"no input has a dimension {seq_dim}", field="seq_dim")
    return tensors[0].shape[0], with_sequence[0].shape[seq_dim]


def _stand_in(leaf: Any, *, seq_dim: int | None, longest: int, length: int) -> Any:
    """A fake tensor like the example's, its sequence (and both sides of a square mask) cut to `length`."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = list(leaf.shape)
    if seq_dim is not None and len(shape) > seq_dim and shape[seq_dim] == longest:
        shape[seq_dim] = length
    elif seq_dim is not None and shape[-2:] == [longest, longest]:
        shape[-2:] = [length, length]
    return torch.empty(shape, dtype=leaf.dtype, device="cpu", requires_grad=leaf.requires_grad)


def _stand_ins(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Fake parameters and buffers; tied ones stay tied."""
    shadows: dict[int, torch.Tensor] = {}
    state = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if id(tensor) not in shadows:
            shadow = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            shadows[id(tensor)] = shadow.requires_grad_(tensor.requires_grad)
        state[name] = shadows[id(tensor)]
    return state


def _call(module: torch.nn.Module, state: dict[str, torch.Tensor], args: list[Any], kwargs: dict[str, Any]) -> Any:
    with FusedAttention():
        return torch.func.functional_call(module, state, tuple(args), kwargs, tie_weights=True)


class FusedAttention(TorchFunctionMode):  # type: ignore[misc]
    """Without a device PyTorch would spell attention out with its score matrix; devices run it fused. Trace what runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _fused_attention(*args, **kwargs)
        return func(*args, **kwargs)


def _fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    bias = None
    if attn_mask is not None:
        bias = attn_mask.expand(*query.shape[:-1], key.size(-2))
        bias = bias if bias.dtype == query.dtype else torch.zeros_like(bias, dtype=query.dtype)
    shape = query.shape
    fold = [t.reshape(-1, *t.shape[-3:]) if t.dim() > 4 else t for t in (query, key, value)]
    fold = [t.unsqueeze(0) if t.dim() == 3 else t for t in fold]
    out = torch.ops.aten._scaled_dot_product_efficient_attention(
        *fold, bias, True, dropout_p, is_causal, scale=scale
    )[0]  # fmt: skip
    return out.reshape(*shape[:-1], value.size(-1))


def _count(module: torch.nn.Module, links: list[Link], state: dict[str, torch.Tensor], call: Any) -> dict[str, Counted]:
    """One forward pass; FLOPs and saved tensors go to the link that was entered last."""
    counted = {link.name: Counted() for link in links}
    own_dtype = next((t.dtype for t in state.values() if t.is_floating_point()), torch.float32)
    current = [links[0].name]
    calls: dict[str, int] = {}
    seen: dict[int, torch.Tensor] = {t.untyped_storage()._cdata: t for t in state.values()}
    starts = {(start.module, start.call): link.name for link in links for start in link.calls}
    last = {(link.calls[-1].module, link.calls[-1].call): link.name for link in links}
    flops = FlopCounterMode(display=False)
    mark = [0]

    def settle() -> None:
        total = flops.get_total_flops()
        counted[current[0]].flops += total - mark[0]
        mark[0] = total

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = tensor
            kind, size = _kept_kind(tensor, own_dtype)
            counted[current[0]].kept[kind] += storage.nbytes() // size
        return tensor

    def hooks(path: str) -> tuple[Any, Any]:
        def enter(_: Any, __: Any) -> None:
            key = (path, calls.get(path, 0))
            if key in starts:
                settle()
                current[0] = starts[key]

        def leave(_: Any, __: Any, output: Any) -> None:
            key = (path, calls.get(path, 0))
            calls[path] = key[1] + 1
            if key in last:
                floating = [t for t in tensors_of(output) if t.is_floating_point()]
                counted[last[key]].output = floating[0].numel() if floating else 0

        return enter, leave

    modules = dict(module.named_modules())
    handles = []
    for path in {start.module for link in links for start in link.calls}:
        enter, leave = hooks(path)
        handles += [modules[path].register_forward_pre_hook(enter), modules[path].register_forward_hook(leave)]
    try:
        with flops, torch.autograd.graph.saved_tensors_hooks(save, lambda t: t), torch.enable_grad():
            call()
            settle()
    finally:
        for handle in handles:
            handle.remove()
    return counted


def _kept_kind(tensor: torch.Tensor, own: torch.dtype) -> tuple[str, int]:
    """Tensors in the module's own type follow the job's precision; the rest keep their bytes."""
    if tensor.dtype == own:
        return "activation", tensor.element_size()
    if tensor.dtype == torch.float32:
        return "fp32", 4
    return "byte", 1


def _layer(link: Link, runs: list[Counted], lengths: list[int], batch: int, first: bool) -> Layer:
    """Turn the counts at each length into polynomials per sample."""
    flops = _quadratic(lengths, [run.flops / batch for run in runs])
    keeps = []
    for kind in ("activation", "fp32", "byte"):
        c0, c1, c2 = _quadratic(lengths, [run.kept[kind] / batch for run in runs])
        if c0 or c1 or c2:
            keeps.append(Kept(f"saved_{kind}", c1, c2, c0, dtype=kind, scope="whole"))
    op = Op(
        "forward", "traced", flops[1], flops[2], flops[0], pairs="full", scope="whole",
        weights=(Weight(link.parameters),) if link.parameters else (), keeps=tuple(keeps),
    )  # fmt: skip
    width = runs[-1].output / batch / lengths[-1]
    tokens = 1 if lengths == [1] else 0
    return Layer(link.name, "module", (op,), width, block=link.block, tokens=tokens)


def _replace_input(layer: Layer, previous: Layer | None) -> Layer:
    return replace(layer, width_in=previous.width_out) if previous else layer


def _quadratic(lengths: list[int], values: list[float]) -> tuple[float, float, float]:
    """The polynomial c0 + c1 s + c2 s^2 through the measured points, in exact arithmetic."""
    if len(lengths) == 1:
        return 0.0, values[0], 0.0
    x, y = [Fraction(n) for n in lengths], [Fraction(v) for v in values]
    d1 = (y[1] - y[0]) / (x[1] - x[0])
    d2 = (y[2] - y[1]) / (x[2] - x[1])
    c2 = (d2 - d1) / (x[2] - x[0])
    c1 = d1 - c2 * (x[0] + x[1])
    return float(y[0] - c1 * x[0] - c2 * x[0] ** 2), float(c1), float(c2)
