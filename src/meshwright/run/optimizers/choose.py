"""Create the optimizer that a job names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.run.mesh.mesh import local
from meshwright.run.optimizers.adam8bit import AdamW8bit
from meshwright.run.optimizers.adamw import AdamW
from meshwright.run.optimizers.muon import Muon
from meshwright.run.optimizers.offloaded_states import decaying
from meshwright.run.optimizers.sgd import SGD
from meshwright.run.parallel.parallel_model import Parallel


def optimizer_for(name: str, part: Parallel, lr: float, weight_decay: float) -> Any:
    """Return the optimizer of all parameters that a rank trains."""
    if name == "muon":
        return Muon(part, lr, weight_decay)
    if name == "adamw-8bit" and not part.copies.cut_alike:
        problem = "adamw-8bit would let copies of a parameter drift apart that are cut differently"
        raise InputError(problem, field="job.optimizer", valid="adamw, adamw-16bit, or the same cut for all copies")
    return optimizer_named(name, part.parameters(), lr, weight_decay)


def optimizer_named(name: str, weights: Iterable[Tensor], lr: float, weight_decay: float) -> Any:
    """Return the optimizer of any weights. Norms and biases get no weight decay."""
    weights = [weight for weight in weights if weight.requires_grad]
    groups = decaying(weights, weight_decay) or [{"params": []}]  # a stage may have no trained parameters
    if name in ("adamw", "adamw-16bit"):
        return AdamW(groups, lr=lr, moments=torch.float32 if name == "adamw" else torch.bfloat16)
    if name == "adamw-8bit":
        return AdamW8bit(groups, lr=lr)
    if name in ("sgd", "sgd-momentum"):
        return SGD(groups, lr=lr, momentum=0.9 if name == "sgd-momentum" else 0.0)
    raise InputError(
        f"{name} is not for weights alone", field="job.optimizer", valid="adamw, adamw-16bit, adamw-8bit, sgd"
    )


def updates_of(optimizer: Any) -> int:
    """Return the number of updates so far; skipped steps do not count."""
    if isinstance(optimizer, AdamW8bit):
        return max((state["step"] for state in optimizer.state.values()), default=0)
    return int(optimizer.param_groups[0].get("step", 0))


@torch.no_grad()
def restore(optimizer: Any, weight: Tensor, states: dict[str, Tensor], step: int) -> None:
    """Restore from `states` that were read: recode 8-bit moments, and round 16-bit weights from their copy."""
    if isinstance(optimizer, AdamW8bit):
        optimizer.restore(weight, states, step)
    elif "master" in states:
        local(weight.detach()).copy_(states["master"])
