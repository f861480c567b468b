"""Stochastic gradient descent, with momentum by choice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from meshwright.run.sharding import local


class SGD(torch.optim.Optimizer):
    """State lies beside the local part of every parameter, in its shape.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> weight.grad = torch.ones(1)
    >>> SGD([weight], lr=0.5).step()
    >>> weight.detach()
    tensor([0.5000])
    """

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float = 0.0, momentum: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    def states(self, weight: Tensor) -> dict[str, Tensor]:
        """What is kept of a parameter, in the shape of its local part; made where there is none yet."""
        state: dict[str, Tensor] = self.state[weight]
        own = local(weight.detach())
        if not state and self.defaults["momentum"]:
            state["momentum"] = torch.zeros_like(own, dtype=torch.float32)
        if "master" not in state and own.dtype != torch.float32:
            state["master"] = own.float()
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state, own = self.states(weight), local(weight.detach())
                master = state.get("master", own)
                change = local(weight.grad).float().add(master, alpha=group["weight_decay"])
                if "momentum" in state:
                    change = state["momentum"].mul_(group["momentum"]).add_(change)
                master.sub_(change, alpha=group["lr"])
                if master is not own:
                    own.copy_(master)
