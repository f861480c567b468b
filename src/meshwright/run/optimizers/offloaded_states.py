"""Optimizer states in host memory (ZeRO-Offload; Ren et al., 2021).

Gradients are copied to the host, its CPU updates, and new weights are copied back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.run.memory.offload_share import on_host
from meshwright.run.mesh.mesh import local

_AHEAD = 2  # gradients in transfer to the host while one is used
Send = Callable[[Tensor], None]  # copies a new value to the weight


def fresh_states(weight: Tensor, names: Sequence[str], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return zeros by name in the shape of a weight's local shard, and a float32 copy of a 16-bit weight."""
    own = local(weight.detach())
    make = pinned if on_host(weight) else torch.empty_like
    found = {name: make(own, dtype=dtype).zero_() for name in names}
    if own.dtype != torch.float32:
        found["master"] = make(own, dtype=torch.float32).copy_(own)
    return found


def decaying(weights: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups: norms and biases get no weight decay."""
    every = list(weights)
    groups = [
        {"params": [weight for weight in every if weight.dim() > 1], "weight_decay": weight_decay},
        {"params": [weight for weight in every if weight.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def visits(weights: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Send]]:
    """Yield every weight with its gradient in host memory, and a function that takes the weight's new value.

    Copies overlap with the updates; later work on the device waits for the last of them.
    """
    for weight in weights:
        if not weight.is_cuda:  # the weight itself is in host memory
            yield weight, local(weight.grad), local(weight.detach()).copy_
    weights = [weight for weight in weights if weight.is_cuda]
    if not weights:
        return
    main, down, up = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    down.wait_stream(main)
    up.wait_stream(main)
    coming: deque[tuple[Tensor, Tensor, Any]] = deque()
    for weight in weights:
        grad = local(weight.grad)
        with torch.cuda.stream(down):
            arrived = pinned(grad).copy_(grad, non_blocking=True)
            coming.append((weight, arrived, down.record_event()))
        if len(coming) > _AHEAD:
            yield _here(*coming.popleft(), up)
    while coming:
        yield _here(*coming.popleft(), up)
    main.wait_stream(up)


def _here(weight: Tensor, grad: Tensor, arrived: Any, up: Any) -> tuple[Tensor, Tensor, Send]:
    arrived.synchronize()
    if grad.dtype != torch.float32:  # reused memory: page faults of fresh memory would cost more than the update
        grad = pinned(local(weight.detach()), torch.float32).copy_(grad)

    def send(value: Tensor) -> None:
        own = local(weight.detach())
        staged = pinned(own).copy_(value)
        with torch.cuda.stream(up):
            own.copy_(staged, non_blocking=True)

    return weight, grad, send


def pinned(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return pinned host memory of a tensor's shape, which a device can copy from and to asynchronously."""
    return torch.empty(like.shape, dtype=dtype or like.dtype, pin_memory=like.is_cuda)
