"""Uniform plans, which other frameworks know: one pipeline of equal stages, one strategy, cuts between blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from meshwright.frameworks.contract import Inexpressible
from meshwright.models import Model
from meshwright.plans import Job, Plan
from meshwright.plans.document import Overlap, Pipeline
from meshwright.plans.schedule import Schedule, ScheduleName
from meshwright.plans.spans import layer_range, span_name
from meshwright.plans.strategy import DEFAULT_ORDER, Span, Strategy

_LEVELS = ("none", "selective", "full")
_DEGREES = ("dp", "zero", "zero_group", "tp", "sp", "ulysses", "ring", "ep", "etp")


@dataclass(frozen=True)
class Uniform:
    """One strategy for all layers, and the blocks of each stage; the embedding is first, the head last."""

    strategy: Strategy
    schedule: Schedule
    micro_batches: int
    blocks: tuple[int, ...]  # of each stage, in the model's order
    overlap: Overlap

    @property
    def groups(self) -> int:
        """Device groups of the pipeline: pp."""
        return len(self.blocks) // self.schedule.virtual

    def micro_batch(self, job: Job) -> int:
        """Return the samples that one replica takes at a time."""
        return job.global_batch // self.micro_batches // self.strategy.dp


def settle(job: Job, plan: Plan) -> tuple[Uniform, tuple[str, ...]]:
    """Return the nearest uniform plan, and a line for everything that it drops."""
    if len(plan.pipelines) > 1:
        raise Inexpressible(f"the plan has {len(plan.pipelines)} pipelines; other frameworks train one")
    (pipeline,) = plan.pipelines
    if len({len(stage.ranks) for stage in pipeline.stages}) > 1:
        counts = ", ".join(str(len(stage.ranks)) for stage in pipeline.stages)
        raise Inexpressible(f"the stages have {counts} devices; other frameworks give every stage the same")
    missing = list(_ours(plan))
    strategy = _strategy(job, pipeline, missing)
    blocks = _blocks(job.model, pipeline, missing)
    schedule = pipeline.schedule
    if schedule.name == "custom":
        name: ScheduleName = "interleaved" if schedule.virtual > 1 else "1f1b"
        missing.append(f"schedule: a table of one's own; {name} instead")
        schedule = Schedule(name=name, virtual=schedule.virtual)
    return Uniform(strategy, schedule, pipeline.micro_batches, blocks, plan.overlap), tuple(missing)


def plan_of(job: Job, uniform: Uniform) -> Plan:
    """Return the plan with the same meaning."""
    names = stages_of(job.model, uniform.blocks)
    table: dict[str, Any] = {name: getattr(uniform.strategy, name) for name in _DEGREES}
    table |= {"recompute": uniform.strategy.recompute, "offload": msgspec.to_builtins(uniform.strategy.offload)}
    table |= {"schedule": uniform.schedule.name, "virtual": uniform.schedule.virtual}
    table |= {"micro_batches": uniform.micro_batches, "stages": [{"layers": name} for name in names]}
    return Plan.of(table | {"overlap": msgspec.to_builtins(uniform.overlap)}, job)


def stages_of(model: Model, blocks: tuple[int, ...]) -> list[str]:
    """Return the layers of stages with these numbers of blocks.

    >>> stages_of(Model.preset("tiny-llama"), (1, 3))
    ['embed..block.0', 'block.1..head']
    """
    return [span_name(model, range(a, b)) for a, b in pairwise(_cuts(model, blocks))]


def _ours(plan: Plan) -> list[str]:
    """Return the choices of a plan that only our framework has."""
    spans = [span for pipeline in plan.pipelines for stage in pipeline.stages for span in stage.spans]
    missing = []
    if any(span.swap for span in spans):
        missing.append("swap: activations stay on their own devices")
    if any(span.shares for span in spans):
        missing.append("shares: every replica takes as many samples")
    if any(span.order != DEFAULT_ORDER for span in spans):
        missing.append(f"order: axes from adjacent devices outwards are {', '.join(DEFAULT_ORDER)}")
    if plan.compression:
        missing.append("compression: gradients travel as they are")
    return missing


def _strategy(job: Job, pipeline: Pipeline, missing: list[str]) -> Strategy:
    """Return the degrees of most layers, and the strongest memory savings of any, so that the rest still fits."""
    weight: Counter[tuple[Any, ...]] = Counter()
    spans: list[Span] = [span for stage in pipeline.stages for span in stage.spans]
    for span in spans:
        degrees = tuple(getattr(span, name) for name in _DEGREES)
        weight[degrees] += len(layer_range(job.model, span.layers))
    chosen = dict(zip(_DEGREES, weight.most_common(1)[0][0], strict=True))
    if len(weight) > 1:
        said = ", ".join(f"{name}={value}" for name, value in chosen.items() if value not in (0, 1, False))
        missing.append(f"spans: {len(weight)} ways to cut layers; all are cut like most ({said or 'not at all'})")
    offload = max((span.offload for span in spans), key=lambda o: o.activations + o.optimizer + o.parameters)
    if len({span.offload for span in spans}) > 1:
        missing.append("offload: differs between layers; all keep as much on the host as the one that keeps most")
    return Strategy(**chosen, recompute=_recompute(job.model, spans, missing), offload=offload)


def _recompute(model: Model, spans: list[Span], missing: list[str]) -> Any:
    """Return all operators that any layer recomputes."""
    said = {span.recompute for span in spans}
    if len(said) == 1:
        return said.pop()
    levels = [level for level in _LEVELS if level in said]
    named = {name for choice in said if not isinstance(choice, str) for name in choice}
    cheap = {name for layer in model.layers for name in layer.recomputed_ops("selective")}
    most: Any = levels[-1] if levels and (levels[-1] == "full" or not named) else tuple(sorted(named))
    if levels and levels[-1] == "selective":
        most = "selective" if named <= cheap else tuple(sorted(named | cheap))
    text = most if isinstance(most, str) else "+".join(most)
    missing.append(f"recompute: differs between layers; all repeat {text}")
    return most


def _blocks(model: Model, pipeline: Pipeline, missing: list[str]) -> tuple[int, ...]:
    """Return the blocks of each stage; a cut inside a block moves behind it."""
    starts = _block_starts(model)
    ends = [layer_range(model, stage.spans[-1].layers).stop for stage in pipeline.stages[:-1]]
    first, last = starts[0], _last_block_end(model)
    counts, before = [], 0
    for end in ends:
        inside = first < end < last and end not in starts
        if inside:
            missing.append(f"cut inside {model.layers[end].block}: moved behind it")
        taken = sum(start < end for start in starts)
        counts.append(taken - before)
        before = taken
    return _none_empty(model, [*counts, len(starts) - before], missing)


def _none_empty(model: Model, counts: list[int], missing: list[str]) -> tuple[int, ...]:
    """Return the blocks with none empty.

    A stage of less than a block may have lost it; only the first and the last stage have other layers.
    """
    cuts = _cuts(model, tuple(counts))
    if all(a < b for a, b in pairwise(cuts)):
        return tuple(counts)
    if sum(counts) < len(counts):
        raise Inexpressible(
            f"{len(counts)} stages share {sum(counts)} blocks; other frameworks give a stage whole ones"
        )
    missing.append("stages of less than a block: blocks are dealt evenly")
    return dealt(sum(counts), len(counts))


def dealt(blocks: int, stages: int) -> tuple[int, ...]:
    """Return the blocks of each stage, as even as they go.

    >>> dealt(7, 3)
    (3, 2, 2)
    """
    each, extra = divmod(blocks, stages)
    return tuple(each + (stage < extra) for stage in range(stages))


def _block_starts(model: Model) -> list[int]:
    seen: dict[str, int] = {}
    for i, layer in enumerate(model.layers):
        if layer.block:
            seen.setdefault(layer.block, i)
    return list(seen.values()) or list(range(len(model.layers)))


def _last_block_end(model: Model) -> int:
    return max((i for i, layer in enumerate(model.layers) if layer.block), default=len(model.layers) - 1) + 1


def _cuts(model: Model, blocks: tuple[int, ...]) -> list[int]:
    """Return the first layer of each stage, and the end."""
    starts, taken, cuts = _block_starts(model), 0, [0]
    for count in blocks[:-1]:
        taken += count
        cuts.append(starts[taken] if taken < len(starts) else _last_block_end(model))
    return [*cuts, len(model.layers)]
