"""AdamW (Loshchilov and Hutter, 2019) on the shard of a parameter that a rank has.

Moments are float32, or bfloat16 by choice. 16-bit parameters have a float32 copy that is updated, since a step is often
smaller than the last bit of a 16-bit weight. For offloaded weights (`offload.py`) all this is in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from meshwright.run.memory.offload_share import on_host
from meshwright.run.mesh.mesh import local
from meshwright.run.optimizers.offloaded_states import Send, fresh_states, visits

_PIECE = 2**25  # elements converted at a time


class AdamW(torch.optim.Optimizer):
    """AdamW whose states have the shape and device of each parameter's local shard.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.tensor([1.0, -1.0])
    >>> AdamW([weight], lr=0.1, weight_decay=0.0).step()
    >>> weight.detach()
    tensor([0.9000, 1.1000])
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
        weight_decay: float = 0.1, moments: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.moments = moments

    def states(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the states of a parameter, in the shape of its local shard; create them if missing."""
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state.update(fresh_states(weight, ("first", "second"), self.moments))
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            # A shard may be empty: fewer rows than shards.
            every = [weight for weight in group["params"] if weight.grad is not None and local(weight).numel()]
            here = [weight for weight in every if not on_host(weight)]
            plain = [weight for weight in here if weight.dtype == torch.float32 == self.moments]
            if plain:
                own = [local(weight.detach()) for weight in plain]
                states = [self.states(weight) for weight in plain]
                self._adamw(own, [local(weight.grad) for weight in plain], states, group)
            narrow = [weight for weight in here if weight.dtype != torch.float32 or self.moments != torch.float32]
            for pieces in _batches([piece for weight in narrow for piece in self._pieces(weight)]) if narrow else ():
                values, wide, grads, firsts, seconds = zip(*pieces, strict=True)
                states = [{"first": first, "second": second} for first, second in zip(firsts, seconds, strict=True)]
                self._adamw(list(wide), list(grads), states, group)
                copied = [(value, master) for value, master in zip(values, wide, strict=True) if value is not master]
                if copied:
                    torch._foreach_copy_(*map(list, zip(*copied, strict=True)))
            hosted = [weight for weight in every if on_host(weight)]
            for weight, grad, send in visits(hosted) if hosted else ():
                self._update_on_host(weight, grad, group, send)

    def _pieces(self, weight: Tensor) -> list[tuple[Tensor, ...]]:
        """Yield a weight, its updated copy, the gradient and both moments, some elements at a time."""
        state, own = self.states(weight), local(weight.detach())
        whole = (own, state.get("master", own), local(weight.grad).contiguous(), state["first"], state["second"])
        pieces = list(zip(*(one.view(-1).split(_PIECE) for one in whole), strict=True))
        return pieces if "master" in state else [(value, value, *rest) for value, _, *rest in pieces]

    def _update_on_host(self, weight: Tensor, grad: Tensor, group: dict[str, Any], send: Send) -> None:
        state, own = self.states(weight), local(weight.detach())
        master = state.get("master", own).cpu()
        self._adamw([master], [grad], [state], group)
        if master is not own:
            send(master)

    def _adamw(
        self, weights: list[Tensor], grads: list[Tensor], states: list[dict[str, Tensor]], group: dict[str, Any]
    ) -> None:
        firsts, seconds = ([state[name].float() for state in states] for name in ("first", "second"))
        adamw(
            weights, [grad.float() for grad in grads], firsts, seconds, [],
            list(torch.full((len(weights),), group["step"] - 1.0, device=weights[0].device).unbind()),
            foreach=False, fused=True, amsgrad=False, maximize=False,
            lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
            weight_decay=group["weight_decay"],
        )  # fmt: skip
        for state, first, second in zip(states, firsts, seconds, strict=True):
            if first is not state["first"]:
                state["first"].copy_(first)
                state["second"].copy_(second)


def _batches(pieces: list[tuple[Tensor, ...]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Group pieces that are converted together; converting all pieces at once would need much memory."""
    batch: list[tuple[Tensor, ...]] = []
    for piece in pieces:
        if batch and sum(one[0].numel() for one in batch) + piece[0].numel() > _PIECE:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch
