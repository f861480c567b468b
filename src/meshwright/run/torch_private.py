"""Every name of PyTorch that is not public, in one place. Seen in torch 2.11 and 2.13."""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "StorageWeakRef",
    "can_split",
    "finish_reduction",
    "flash_backward",
    "flash_forward",
    "gather_in_background",
    "group_timeout",
    "grow_segments",
    "limit_collectives",
    "packed_attention",
    "scaled_mm",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
]

scaled_mm = torch._scaled_mm


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0]


def grow_segments() -> None:
    """CUDA's memory in segments that grow: blocks of many sizes leave no holes. A user's own settings stay.

    Without it a step at 131,072 tokens that needs 67 GiB ends with 10 GiB reserved and free, yet out of 80.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


@cache
def can_split() -> bool:
    """Return True if a backward pass through custom functions can run in halves (torch 2.13 can, 2.11 cannot)."""
    x, weight = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    with torch.enable_grad():
        node = _Same.apply(x, weight).grad_fn
    try:
        torch.autograd.grad([GradientEdge(node, 0)], [weight], [torch.ones(1)])
    except RuntimeError:
        return False
    return True


def finish_reduction(module: FSDPModule) -> None:
    """Scatter gradients that were left whole: what a backward pass does at its end, for one that was run in halves."""
    state = fully_shard.state(module)
    for each in state._state_ctx.all_states:
        groups = each._fsdp_param_groups if hasattr(each, "_fsdp_param_groups") else [each._fsdp_param_group]
        for group in groups:
            if group:
                group.post_backward()
    state._root_post_backward_final_callback()


def gather_in_background(module: FSDPModule) -> None:
    """Gathers of parameters return at once and are waited for when the parameters are used."""
    module._set_unshard_async_op(True)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of (batch, head, token, dim) and the logarithms of its softmax's sums, (batch, head, token)."""
    if q.is_cuda:
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return found[0], found[1]
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, total


def flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, from outputs and sums over these keys and any others."""
    if not q.is_cuda:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        cpu: tuple[Tensor, Tensor, Tensor] = backward(d_out, q, k, v, out, total, 0.0, causal, scale=scale)
        return cpu
    seed = torch.zeros(2, dtype=torch.int64, device=q.device)
    sizes = (None, None, q.shape[2], k.shape[2])
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    cuda: tuple[Tensor, Tensor, Tensor] = backward(
        d_out, q, k, v, out, total, *sizes, 0.0, causal, seed, seed[:0], scale=scale
    )
    return cuda


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float | None, window: tuple[int, int]
) -> Tensor:
    """Causal attention inside sequences that lie one behind the other: (token, head, dim), heads of keys may be fewer."""
    from torch.nn.attention.varlen import varlen_attn

    # Heads of keys that are shared are said since torch 2.13, and taken as they are before.
    said = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    width = v.shape[-1]
    if width < q.shape[-1]:  # the kernel wants values as wide as keys (latent attention has narrower ones)
        v = torch.nn.functional.pad(v, (0, q.shape[-1] - width))
    found: Tensor = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scale, window_size=window, **said)
    return found[..., :width]


def limit_collectives(timeout: timedelta) -> None:
    """Let no collective of the default process group take longer."""
    distributed_c10d._set_pg_timeout(timeout, None)


def group_timeout() -> timedelta:
    """Return how long a collective of the default process group may take; groups made without it get 30 minutes."""
    found: timedelta = distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
    return found
