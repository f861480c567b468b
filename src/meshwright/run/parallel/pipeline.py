"""A pipeline of a plan on one process: its stages, and the action table that PyTorch's runtime runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.plans.action_table import action_table
from meshwright.plans.document import Pipeline
from meshwright.plans.schedule import group_of_stage
from meshwright.run.parallel.pipeline_stage import Stage
from meshwright.run.parallel.stage_part import MicroBatch
from meshwright.run.torch_private import Action, Runtime


def halved(pipeline: Pipeline) -> bool:
    """Whether some backward passes come in two halves: input gradients first, weight gradients later."""
    groups = len(pipeline.stages) // pipeline.schedule.virtual
    table = action_table(pipeline.schedule, groups, pipeline.micro_batches)
    return any(kind == "W" for row in table for _, kind, _ in row)


class Train:
    """Runs the micro-batches of a step through the stages of this process."""

    def __init__(self, pipeline: Pipeline, stages: Sequence[Stage]) -> None:
        groups = len(pipeline.stages) // pipeline.schedule.virtual
        table = action_table(pipeline.schedule, groups, pipeline.micro_batches)
        self.halved = halved(pipeline)
        for stage in stages:
            stage.micro_batches, stage.split = pipeline.micro_batches, self.halved
        self.stages = list(stages)
        self.last = any(stage.is_last for stage in stages)
        self._runtime = Runtime(self.stages, pipeline.micro_batches, loss_fn=_same, scale_grads=False)
        rows = {
            group: [Action.from_str("".join(map(str, action))) for action in row] for group, row in enumerate(table)
        }
        self._runtime.prepare(rows)

    def step(self, batches: Sequence[MicroBatch], divisor: float, *, backward: bool = True) -> Tensor:
        """The sum of the losses that this process computed over `divisor`; gradients are left in the parameters."""
        for stage in self.stages:
            stage.clear_runtime_states()
            stage.divisor = divisor
        losses: list[Tensor] = []
        self._runtime.run([(batch,) for batch in batches], losses, backward=backward)
        total = torch.zeros((), device=self.stages[0].like.device)
        for loss in losses:
            total += loss.detach().to(total.dtype)
        return total


def _same(output: Tensor, target: None) -> Tensor:
    """The last stage returns the loss itself."""
    return output


def group_index(pipeline: Pipeline, stage: int) -> int:
    """The device group that runs a stage."""
    return group_of_stage(pipeline.schedule, len(pipeline.stages), stage)
