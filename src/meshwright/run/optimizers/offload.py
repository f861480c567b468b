"""Optimizer states in host memory: gradients come down, the host's processors update, new weights go up (ZeRO-Offload;
Ren et al., 2021)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.run.memory.offload_share import on_host
from meshwright.run.mesh.mesh import local

_AHEAD = 2  # gradients that are on their way down while one is used
Send = Callable[[Tensor], None]  # a new value, up to the weight


def fresh_states(weight: Tensor, names: Sequence[str], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Zeros by name in the shape of a weight's local part, where its states live, and the float32 copy of a 16-bit one."""
    own = local(weight.detach())
    make = pinned if on_host(weight) else torch.empty_like
    found = {name: make(own, dtype=dtype).zero_() for name in names}
    if own.dtype != torch.float32:
        found["master"] = make(own, dtype=torch.float32).copy_(own)
    return found


def decaying(weights: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Groups of an optimizer: norms and biases do not decay."""
    every = list(weights)
    groups = [
        {"params": [weight for weight in every if weight.dim() > 1], "weight_decay": weight_decay},
        {"params": [weight for weight in every if weight.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def visits(weights: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Send]]:
    """Every weight with its gradient in host memory, and what takes a new value of the weight.

    ReplicaSync run beside the updates; whatever comes next on the device waits for the last of them.
    """
    for weight in weights:
        if not weight.is_cuda:  # it lives there itself
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
    if grad.dtype != torch.float32:  # into memory that was used before: fresh pages would cost more than the update
        grad = pinned(local(weight.detach()), torch.float32).copy_(grad)

    def send(value: Tensor) -> None:
        own = local(weight.detach())
        staged = pinned(own).copy_(value)
        with torch.cuda.stream(up):
            own.copy_(staged, non_blocking=True)

    return weight, grad, send


def pinned(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Host memory of a tensor's shape, which a device can copy from and to by itself."""
    return torch.empty(like.shape, dtype=dtype or like.dtype, pin_memory=like.is_cuda)
