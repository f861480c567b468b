"""Optimizer states in host memory: gradients come down, the host's processors update, new weights go up (ZeRO-Offload;
Ren et al., 2021)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.run.evenly import Evenly
from meshwright.run.sharding import local

_AHEAD = 2  # gradients that are on their way down while one is used
Send = Callable[[Tensor], None]  # a new value, up to the weight


def keep_on_host(weights: Sequence[Tensor], fraction: float, always: Collection[Tensor] = ()) -> None:
    """Mark as many of the weights as make up a fraction of their elements: their states will live in host memory.

    Those that are there `always`, since the weights themselves are, count first.

    >>> weights = [torch.nn.Parameter(torch.ones(8)) for _ in range(4)]
    >>> keep_on_host(weights, 0.5)
    >>> [on_host(weight) for weight in weights]
    [True, False, True, False]
    """
    share = Evenly(fraction)
    for weight in sorted(weights, key=lambda weight: weight not in always):
        if share.takes(weight.numel(), must=weight in always):
            weight.states_on_host = True


def on_host(weight: Tensor) -> bool:
    """Whether the states of a weight are to live there."""
    return getattr(weight, "states_on_host", False)


def visits(weights: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor, Send]]:
    """Every weight with its gradient in host memory, and what takes a new value of the weight.

    Copies run beside the updates; whatever comes next on the device waits for the last of them.
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

    def send(value: Tensor) -> None:
        own = local(weight.detach())
        staged = pinned(own).copy_(value)
        with torch.cuda.stream(up):
            own.copy_(staged, non_blocking=True)

    return weight, grad, send


def pinned(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Host memory of a tensor's shape, which a device can copy from and to by itself."""
    return torch.empty(like.shape, dtype=dtype or like.dtype, pin_memory=like.is_cuda)
