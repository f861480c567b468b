"""Any PyTorch module as a model, traced without allocating a weight, and planned by hand. Needs torch."""

from __future__ import annotations

import torch
from rich.console import Console
from torch import nn

import meshwright as mw
from meshwright.base.units import count, size
from meshwright.cost import plan_memory
from meshwright.plans.picture import draw


class Block(nn.Module):
    """A residual convolution block: nothing the presets know about."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(4 * width, width, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


with torch.device("meta"):  # a large module that is never allocated
    module = nn.Sequential(
        nn.Conv2d(3, 1024, 16, 16),
        *(Block(1024) for _ in range(24)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1024, 1000),
    )

model = mw.Model.from_module(module, torch.empty(2, 3, 256, 256, device="meta"), name="my convnet")
one = mw.Slice(micro_batch=1, seq_len=1)
console = Console()
console.rule("any torch.nn.Module")
console.print(f"{model}: {count(model.forward_flops(one))}FLOP forward, {size(model.kept_bytes(one))} kept per image")
job = mw.Job(model, mw.Cluster.preset("2x8xa100-40gb"), global_batch=256)
plan = mw.Plan.of({"pp": 4, "micro_batch": 4, "zero": 1}, job)
console.print(draw(plan, job, plan_memory(plan, job), console.width))
