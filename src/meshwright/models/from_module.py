"""Convert any `torch.nn.Module` to a `Model`, traced with fake tensors: nothing is allocated or computed.

- FLOPs come from PyTorch's `FlopCounterMode`.
- Saved activations come from its saved-tensor hooks.
- Layer boundaries come from the module tree (see `module_tree.py`).

With a sequence dimension, three traces of different length determine the quadratics that FLOPs and bytes are in
transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from meshwright.errors import InputError
from meshwright.models.layer import Kept, Layer, Op, Weight
from meshwright.models.model import Model
from meshwright.models.model_table import write_model
from meshwright.models.module_tree import Call, Link, find_links, identity, tensors_of


def traced_model(
    module: torch.nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any], *, name: str, seq_dim: int | None
) -> Model:
    """Trace `module(*inputs, **keywords)` as in training and return its chain."""
    batch, longest = _sizes((inputs, keywords), seq_dim)
    lengths = [1] if seq_dim is None else _three_lengths(longest)
    links: list[Link] = []
    runs: list[dict[str, Counted]] = []
    for length in lengths:
        cut = partial(_stand_in, seq_dim=seq_dim, longest=longest, length=length)
        try:
            with _as_it_was(module), FakeTensorMode(allow_non_fake_inputs=True), _plain_kernels():
                module.train()
                state = _stand_ins(module)
                args, kwargs = tree_map(cut, (list(inputs), dict(keywords)))
                call = partial(_call, module, state, args, kwargs)
                links = links or find_links(module, call)
                runs.append(Counter(module, links, state).run(call))
        except Exception as error:  # whatever the user's forward raises
            at = f" at sequence length {length}" if seq_dim is not None else ""
            problem = f"{type(module).__name__} cannot be traced{at}: {type(error).__name__}: {_first_line(error)}"
            hint = "a forward that does not look at the values of its tensors, and example inputs that fit it"
            hint += "; the module in bfloat16, as this operator wants it" if "BF16" in str(error) else ""
            raise InputError(problem, field="from_module", valid=hint) from error
    if len(links) == 1:
        problem = (
            f"found no chain of blocks in {type(module).__name__}: it becomes one layer, which no pipeline can cut"
        )
        warnings.warn(problem, stacklevel=3)
    layers = [_layer(link, [run[link.name] for run in runs], lengths, batch) for link in links]
    inside = [0.0, *(layer.width_out for layer in layers)]
    layers = [replace(layer, width_in=width) for layer, width in zip(layers, inside, strict=False)]
    label = name or type(module).__name__
    model = Model(label, "module", tuple(layers), 0 if seq_dim is None else longest, tokens=int(seq_dim is None))
    return replace(model, reference=write_model(model))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _three_lengths(longest: int) -> list[int]:
    """Return three lengths, the longest first; multiples of 32 if there is room, as kernels pad to those."""
    if longest < 8:
        raise InputError(f"the example's sequence has {longest} elements", field="seq_dim", valid="8 or more")
    quarter = longest // 128 * 32 or longest // 4
    return [4 * quarter, 2 * quarter, quarter]


def _sizes(example: Any, seq_dim: int | None) -> tuple[int, int]:
    """Return batch and sequence length of the example inputs."""
    if seq_dim is not None and (isinstance(seq_dim, bool) or not isinstance(seq_dim, int) or seq_dim < 1):
        raise InputError(f"is {seq_dim!r}", field="seq_dim", valid="the number of a dimension, 1 or more")
    tensors = tensors_of(example)
    if not tensors or any(t.dim() == 0 for t in tensors) or tensors[0].shape[0] == 0:
        raise InputError("needs example input tensors with the batch as dimension 0", field="inputs")
    if seq_dim is None:
        return tensors[0].shape[0], 1
    with_sequence = [t for t in tensors if t.dim() > seq_dim]
    if not with_sequence:
        raise InputError(f"no input has a dimension {seq_dim}", field="seq_dim")
    return tensors[0].shape[0], with_sequence[0].shape[seq_dim]


def _stand_in(leaf: Any, *, seq_dim: int | None, longest: int, length: int) -> Any:
    """Return a fake tensor like the example's, its sequence (and both sides of a square mask) cut to `length`."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = list(leaf.shape)
    mask = leaf.dtype == torch.bool or (leaf.is_floating_point() and leaf.dim() == 2)
    if seq_dim is not None and mask and shape[-2:] == [longest, longest]:
        shape[-2:] = [length, length]
    elif seq_dim is not None and len(shape) > seq_dim and shape[seq_dim] == longest:
        shape[seq_dim] = length
    return torch.empty(shape, dtype=leaf.dtype, device="cpu", requires_grad=leaf.requires_grad)


def _stand_ins(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return fake parameters and buffers, each under one of its names; tied ones stay tied."""
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").requires_grad_(tensor.requires_grad)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }


@contextmanager
def _as_it_was(module: torch.nn.Module) -> Iterator[None]:
    """Undo the changes a call leaves in modules: cached tables, counters, training flags, swapped buffers."""
    held = [(m, dict(m.__dict__)) for m in module.modules()]
    containers = {id(v): (v, copy(v)) for _, facts in held for v in facts.values() if isinstance(v, list | dict | set)}
    try:
        yield
    finally:
        for container, before in containers.values():
            container.clear()
            container.extend(before) if isinstance(container, list) else container.update(before)
        for m, attributes in held:
            m.__dict__.clear()
            m.__dict__.update(attributes)


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Disable oneDNN, so that recurrent layers become products that the FLOP counter knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _call(module: torch.nn.Module, state: dict[str, torch.Tensor], args: list[Any], kwargs: dict[str, Any]) -> Any:
    with FusedAttention():
        return torch.func.functional_call(module, state, tuple(args), kwargs, tie_weights=True)


class FusedAttention(TorchFunctionMode):  # type: ignore[misc]
    """Mode that traces fused attention, as devices run it.

    Without a device, PyTorch would compute the score matrix.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _fused_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Run FlashAttention's operator without a mask, the memory-efficient one with a mask."""
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    shape = query.shape
    folded = [t.reshape(-1, *t.shape[-3:]) if t.dim() > 4 else t for t in (query, key, value)]
    folded = [t.unsqueeze(0) if t.dim() == 3 else t for t in folded]
    if attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(*folded, dropout_p, is_causal, scale=scale)[0].reshape(*shape[:-1], value.size(-1))
    bias = attn_mask if attn_mask.dtype == query.dtype else torch.zeros_like(attn_mask, dtype=query.dtype)
    bias = bias.expand(*folded[0].shape[:-1], folded[1].size(-2))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out = efficient(*folded, bias, True, dropout_p, is_causal, scale=scale)[0]
    return out.reshape(*shape[:-1], value.size(-1))


def _grouped_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Return FLOPs of a grouped product: each row meets one expert, (rows, k) with (experts, k, n), or a batch."""
    rows = a[0] * a[1] if len(a) == 3 else a[0]
    return int(2 * rows * a[-1] * b[-1])


# PyTorch's counter does not know the grouped product of mixtures of experts.
_GROUPED = {torch.ops.aten._grouped_mm: _grouped_flops}


@dataclass
class Counted:
    """FLOPs and kept bytes of one link in one trace."""

    flops: int = 0
    kept: dict[str, int] = field(default_factory=lambda: {"activation": 0, "fp32": 0, "byte": 0})


class Counter:
    """Counter of one forward pass; FLOPs and saved tensors go to the link that was entered last."""

    def __init__(self, module: torch.nn.Module, links: list[Link], state: dict[str, torch.Tensor]) -> None:
        self.module = module
        self.counted = {link.name: Counted() for link in links}
        self.starts = {call: link.name for link in links for call in link.calls}
        self.current = links[0].name
        self.calls: dict[str, int] = {}
        self.own = next((t.dtype for t in state.values() if t.is_floating_point()), torch.float32)
        self.seen = {identity(t): t for t in state.values()}
        self.flops = FlopCounterMode(display=False, custom_mapping=_GROUPED)
        self.settled = 0

    def run(self, call: Callable[[], Any]) -> dict[str, Counted]:
        modules = dict(self.module.named_modules())
        paths = {call.module for call in self.starts}
        handles = [modules[path].register_forward_pre_hook(partial(self.enter, path)) for path in paths]
        try:
            with self.flops, torch.autograd.graph.saved_tensors_hooks(self.save, lambda t: t), torch.enable_grad():
                call()
                self.settle()
        finally:
            for handle in handles:
                handle.remove()
        return self.counted

    def enter(self, path: str, *_: Any) -> None:
        call = Call(path, self.calls.get(path, 0))
        self.calls[path] = call.number + 1
        if call in self.starts:
            self.settle()
            self.current = self.starts[call]

    def settle(self) -> None:
        """Add the FLOPs since the last boundary to the current link."""
        total = self.flops.get_total_flops()
        self.counted[self.current].flops += total - self.settled
        self.settled = total

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count each storage once.

        Tensors in the module's own type follow the job's precision; the rest keep their bytes.
        """
        if identity(tensor) not in self.seen:
            self.seen[identity(tensor)] = tensor
            kind, size = ("byte", 1)
            if tensor.dtype == self.own:
                kind, size = "activation", tensor.element_size()
            elif tensor.dtype == torch.float32:
                kind, size = "fp32", 4
            self.counted[self.current].kept[kind] += tensor.untyped_storage().nbytes() // size
        return tensor


def _layer(link: Link, runs: list[Counted], lengths: list[int], batch: int) -> Layer:
    """Return a layer whose costs per sample are polynomials through the counts at each length."""
    flops = _quadratic(lengths, [run.flops / batch for run in runs])
    keeps = []
    for kind in ("activation", "fp32", "byte"):
        c0, c1, c2 = _quadratic(lengths, [run.kept[kind] / batch for run in runs])
        if c0 or c1 or c2:
            keeps.append(Kept(f"saved_{kind}", c1, c2, c0, dtype=kind, scope="whole"))
    weights = [Weight(link.parameters)] if link.parameters else []
    weights += [Weight(link.frozen, frozen=True)] if link.frozen else []
    ops = [
        Op("forward", "traced", flops[1], flops[2], flops[0], pairs="full", scope="whole", weights=tuple(weights),
           keeps=tuple(keeps))
    ]  # fmt: skip
    shared = [Weight(link.tied)] if link.tied else []
    shared += [Weight(link.tied_frozen, frozen=True)] if link.tied_frozen else []
    if shared:
        ops.append(Op("tied", "traced", scope="whole", weights=tuple(shared), tied=True))
    width = link.crossing / batch / lengths[0]
    tokens = 1 if lengths == [1] else 0
    return Layer(link.name, "module", tuple(ops), width, block=link.block, tokens=tokens, tied_to=link.tied_to)


def _quadratic(lengths: list[int], values: list[float]) -> tuple[float, float, float]:
    """Return the polynomial c0 + c1 s + c2 s^2 through the measured points, in exact arithmetic."""
    if len(lengths) == 1:
        return 0.0, values[0], 0.0
    x, y = [Fraction(n) for n in lengths], [Fraction(v) for v in values]
    d1 = (y[1] - y[0]) / (x[1] - x[0])
    d2 = (y[2] - y[1]) / (x[2] - x[1])
    c2 = (d2 - d1) / (x[2] - x[0])
    c1 = d1 - c2 * (x[0] + x[1])
    return float(y[0] - c1 * x[0] - c2 * x[0] ** 2), float(c1), float(c2)
