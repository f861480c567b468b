"""Stochastic gradient descent, with optional momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from meshwright.run.memory.offload_share import on_host
from meshwright.run.mesh.mesh import local
from meshwright.run.optimizers.offloaded_states import fresh_states, visits


class SGD(torch.optim.Optimizer):
    """SGD whose states have the shape and device of each parameter's local shard.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> weight.grad = torch.ones(1)
    >>> SGD([weight], lr=0.5).step()
    >>> weight.detach()
    tensor([0.5000])
    """

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float = 0.0, momentum: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    def states(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the states of a parameter, in the shape of its local shard; create them if missing."""
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state.update(fresh_states(weight, ("momentum",) if self.defaults["momentum"] else ()))
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            every = [weight for weight in group["params"] if weight.grad is not None]
            for weight in every:
                if not on_host(weight):
                    own = local(weight.detach())
                    value = self._updated(weight, own, local(weight.grad), group)
                    if value is not own:
                        own.copy_(value)
            for weight, grad, send in visits([weight for weight in every if on_host(weight)]):
                send(self._updated(weight, local(weight.detach()).cpu(), grad, group))

    def _updated(self, weight: Tensor, own: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the new value, computed in place or in the float32 copy."""
        state = self.states(weight)
        master = state.get("master", own)
        change = grad.float().add(master, alpha=group["weight_decay"])
        if "momentum" in state:
            change = state["momentum"].mul_(group["momentum"]).add_(change)
        return master.sub_(change, alpha=group["lr"])
