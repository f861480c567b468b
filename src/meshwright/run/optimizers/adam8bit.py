"""AdamW (Loshchilov and Hutter, 2019) with both moments in 8 bits.

Moments are stored in blocks of 256 values that share a scale (Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", 2022). Codes are finer near zero: m = scale * c |c| / 127^2 and v = scale * (c / 255)^4, so that the root
of v, by which Adam divides, spans five decades. Rounding is stochastic: with beta2 = 0.999 a second moment changes by
less than half a code per step, and would never move if rounded to nearest.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.run.kernels.fused import fused
from meshwright.run.memory.offload_share import on_host
from meshwright.run.mesh.mesh import local
from meshwright.run.optimizers.offloaded_states import visits

# Steps inside the backward pass: a gradient lives no longer than its parameter's update needs it.


def step_in_backward(optimizer: AdamW8bit) -> None:
    """Make every backward pass a whole step (LOMO; Lv et al., 2023): gradients never exist all at once.

    This needs one micro-batch per step, and nothing that uses all gradients first, such as clipping by their norm.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = AdamW8bit([weight], lr=0.5, weight_decay=0.0)
    >>> step_in_backward(optimizer)
    >>> weight.sum().backward()
    >>> weight.detach(), weight.grad
    (tensor([0.5000, 0.5000]), None)
    """
    # Parameters keep their hooks alive: hooks must not keep the parameters alive, or nothing is ever freed.
    alive = weakref.ref(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        for weight in group["params"]:
            weight.register_post_accumulate_grad_hook(_updates(alive, index))


def _updates(alive: weakref.ref[AdamW8bit], index: int) -> Callable[[Tensor], None]:
    def update(weight: Tensor) -> None:
        optimizer = alive()
        if optimizer is None:
            raise InputError("the optimizer that steps in the backward pass is gone: keep it", field="optimizer")
        optimizer.update(weight, optimizer.param_groups[index])
        weight.grad = None

    return update


_BLOCK = 256
_NONE = 128  # code of a first moment of zero
_Moments = tuple[Tensor, Tensor, Tensor, Tensor]  # codes of the first and second moment, scales of the first and second


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with 2.03 bytes of state per parameter; bfloat16 parameters are rounded stochastically, and need no copy.

    Sharded parameters are updated shard by shard. Checkpoints hold moments in float32. The plan that wrote them
    restores the same codes bit by bit; another plan, with other blocks, takes the nearest codes. Random numbers depend
    on the parameter's name (`weight.key`) and the step: replicas round alike, and so does a resumed run.

    >>> weight = torch.nn.Parameter(torch.ones(4))
    >>> weight.grad = torch.tensor([1.0, -1.0, 2.0, 0.0])
    >>> AdamW8bit([weight], lr=0.1, weight_decay=0.0).step()
    >>> weight.detach()
    tensor([0.9000, 1.1000, 0.9000, 1.0000])
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def states(self, weight: Tensor) -> dict[str, Tensor]:
        """Return copies of both moments in the shape of the local weight, as float32 in host memory."""
        own = local(weight.detach())
        return dict(zip(("first", "second"), _wide(self._state(weight)["moments"], own), strict=True))

    def restore(self, weight: Tensor, states: dict[str, Tensor], step: int) -> None:
        """Restore the moments from copies that a checkpoint was read into."""
        state = self._state(weight)
        state["step"] = step
        _narrow(states["first"], states["second"], state["moments"])

    def _state(self, weight: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[weight]
        if not state:
            own = local(weight.detach())
            state.update(step=0, moments=_nothing(own, "cpu" if on_host(weight) else own.device))
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            every = [weight for weight in group["params"] if weight.grad is not None]
            for weight in every:
                if not on_host(weight):
                    self.update(weight, group)
            for weight, grad, send in visits([weight for weight in every if on_host(weight)]):
                value = local(weight.detach()).cpu()
                self._update(weight, value, grad, group)
                send(value)

    @torch.no_grad()
    def update(self, weight: Tensor, group: dict[str, Any]) -> None:
        """Update one parameter by its gradient."""
        self._update(weight, local(weight), local(weight.grad), group)

    def _update(self, weight: Tensor, own: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """Update a parameter's values `own`, on whatever device they and the moments are."""
        state = self._state(weight)
        grad = grad.contiguous()
        state["step"] += 1
        if not own.numel():  # an empty shard: fewer rows than shards
            return
        beta1, beta2 = group["betas"]
        correct = (1 - beta1 ** state["step"], 1 - beta2 ** state["step"])
        numbers = (group["lr"], beta1, beta2, group["eps"], group["weight_decay"], *correct)
        rounds = own.dtype == torch.bfloat16
        seed = zlib.crc32(f"{getattr(weight, 'key', '')} {state['step']}".encode()) >> 1
        if fused(own):
            from meshwright.run.kernels.triton import adam8bit as kernel

            kernel.update(own, grad, state["moments"], _BLOCK, seed, numbers, rounds)
        else:
            _update(own, grad, state["moments"], numbers, rounds, torch.Generator(own.device).manual_seed(seed))


def _nothing(weight: Tensor, device: torch.device | str) -> _Moments:
    blocks = -(-weight.numel() // _BLOCK)
    first, second = (torch.zeros(weight.numel(), dtype=torch.uint8, device=device) for _ in range(2))
    scales = torch.zeros(2, blocks, dtype=torch.float32, device=device)
    return first.fill_(_NONE), second, scales[0], scales[1]


def _wide(moments: _Moments, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return both moments in float32, in host memory."""
    first, second, first_scale, second_scale = moments
    code = (first.float() - _NONE) / 127
    m = code * code.abs() * _spread(first_scale, first)
    v = (second.float() / 255) ** 4 * _spread(second_scale, second)
    return m.view(weight.shape).to("cpu", copy=True), v.view(weight.shape).to("cpu", copy=True)


def _narrow(m: Tensor, v: Tensor, moments: _Moments) -> None:
    """Store moments as the nearest codes: those that `_wide` read, if blocks are the same."""
    first, second, first_scale, second_scale = moments
    m, v = (wide.flatten().to(first.device) for wide in (m, v))
    for scale, size, codes, power, most in ((first_scale, m.abs(), first, 2, 127), (second_scale, v, second, 4, 255)):
        scale.copy_(_largest(size))
        parts = size / _spread(scale, size).clamp(min=1.2e-38)
        codes.copy_((parts ** (1 / power) * most).round())
    first.copy_(first * m.sign() + _NONE)
    second.copy_(second.clamp(min=1).where(v > 0, 0))


def _largest(size: Tensor) -> Tensor:
    """Return the largest value of every block."""
    return torch.nn.functional.pad(size, (0, -len(size) % _BLOCK)).view(-1, _BLOCK).amax(dim=1)


def _update(
    weight: Tensor, grad: Tensor, moments: _Moments, numbers: tuple[float, ...], rounds: bool, chance: torch.Generator
) -> None:
    """Do the kernel's update in plain PyTorch."""
    rate, beta1, beta2, eps, decay, correct1, correct2 = numbers
    first, second, first_scale, second_scale = moments
    g, w = grad.flatten().float(), weight.flatten().float()
    code = (first.float() - _NONE) / 127
    m = beta1 * code * code.abs() * _spread(first_scale, w) + (1 - beta1) * g
    v = beta2 * (second.float() / 255) ** 4 * _spread(second_scale, w) + (1 - beta2) * g * g
    w = w * (1 - rate * decay) - rate * (m / correct1) / ((v / correct2).sqrt() + eps)
    weight.copy_((_rounded(w, chance) if rounds else w).view_as(weight))
    for scale, value in ((first_scale, m.abs()), (second_scale, v)):
        scale.copy_(_largest(value))
    code = _coded(m.abs(), first_scale, 2, 127, chance)
    first.copy_(code * m.sign() + _NONE)
    second.copy_(_coded(v, second_scale, 4, 255, chance).clamp(min=1).where(v > 0, 0.0))


def _coded(value: Tensor, scale: Tensor, power: int, most: int, stream: torch.Generator) -> Tensor:
    """Round to the code below or above, at random, so that the mean of the values is right, not that of the codes."""
    size = value / _spread(scale, value).clamp(min=1.2e-38) * most**power
    low = (size ** (1 / power)).floor().clamp(max=most - 1)
    chance = (size - low**power) / ((low + 1) ** power - low**power)
    return low + (torch.rand(size.shape, generator=stream, device=size.device) < chance)


def _spread(scale: Tensor, like: Tensor) -> Tensor:
    return scale.repeat_interleave(_BLOCK)[: len(like)]


def _rounded(x: Tensor, stream: torch.Generator) -> Tensor:
    """Round stochastically to bfloat16: the mean over many roundings is the value itself."""
    noise = torch.randint(0, 2**16, x.shape, generator=stream, device=x.device, dtype=torch.int32)
    bits = x.view(torch.int32) + noise
    return (bits & -(2**16)).view(torch.float32).to(torch.bfloat16)
