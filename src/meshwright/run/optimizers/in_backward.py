"""Steps inside the backward pass: a gradient lives no longer than its parameter's update needs it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from meshwright.errors import InputError
from meshwright.run.optimizers.adam8bit import AdamW8bit


def step_in_backward(optimizer: AdamW8bit) -> None:
    """From now on every backward pass is a whole step (LOMO; Lv et al., 2023): gradients never exist all at once.

    For one micro-batch per step, and without what needs all gradients first, such as clipping by their norm.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = AdamW8bit([weight], lr=0.5, weight_decay=0.0)
    >>> step_in_backward(optimizer)
    >>> weight.sum().backward()
    >>> weight.detach(), weight.grad
    (tensor([0.5000, 0.5000]), None)
    """
    # Parameters hold on to their hooks: these must not hold on to the parameters, or nothing is ever freed.
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
