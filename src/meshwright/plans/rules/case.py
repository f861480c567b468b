"""Input and output of a rule: the plan with its job, and a violation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshwright.models import Layer
from meshwright.plans.document import Pipeline, Plan, Stage
from meshwright.plans.job import Job
from meshwright.plans.spans import layers_of
from meshwright.plans.strategy import Span


@dataclass(frozen=True)
class Broken:
    """One violation: the field, the problem, and valid values."""

    field: str
    problem: str
    valid: str = ""


@dataclass(frozen=True)
class Case:
    """Plan with its job found, and every span beside its place in the document."""

    plan: Plan
    job: Job

    @cached_property
    def stages(self) -> list[tuple[str, Pipeline, Stage]]:
        return [
            (f"pipelines[{p}].stages[{s}]", pipeline, stage)
            for p, pipeline in enumerate(self.plan.pipelines)
            for s, stage in enumerate(pipeline.stages)
        ]

    @cached_property
    def spans(self) -> list[tuple[str, Pipeline, Stage, Span]]:
        return [
            (f"{field}.spans[{i}]", pipeline, stage, span)
            for field, pipeline, stage in self.stages
            for i, span in enumerate(stage.spans)
        ]

    def layers(self, span: Span) -> tuple[Layer, ...]:
        return layers_of(self.job.model, span.layers)
