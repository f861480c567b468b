"""Time of one pipeline stage for one micro-batch: its layers, one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.cost.layers.collectives import exchange_seconds
from meshwright.cost.layers.layer import layer_time
from meshwright.cost.layers.layer_config import LayerConfig
from meshwright.cost.layers.passes import PASSES, Part, layer_passes
from meshwright.cost.layers.placement import StagePlacement
from meshwright.plans import Job, Span, Stage
from meshwright.plans.spans import alike, layers_of


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro-batch on one device of a stage."""

    spent: Mapping[Part, float] = field(default_factory=dict)  # on the device; adds up to the two passes
    hidden: Mapping[Part, float] = field(default_factory=dict)  # communication overlapped with computation
    weight_gradient: float = 0.0  # the part of the backward pass that can be delayed (zero-bubble schedules)

    @property
    def forward(self) -> float:
        return sum(seconds for (when, _), seconds in self.spent.items() if when == "forward")

    @property
    def backward(self) -> float:
        """Seconds of the backward pass, with recompute."""
        return sum(seconds for (when, _), seconds in self.spent.items() if when == "backward")


def stage_time(
    job: Job, stages: Sequence[Stage], stage: Stage, site: StagePlacement, share: Callable[[Span], int]
) -> StageTime:
    """Return the time of one micro-batch through every span of a stage, one of the `stages` of its pipeline.

    `share` returns how many of its samples this device's replica of a span takes.
    """
    spent: defaultdict[Part, float] = defaultdict(float)
    hidden: defaultdict[Part, float] = defaultdict(float)
    weight = 0.0
    before: Span | None = None
    for span in stage.spans:
        config = LayerConfig.of(span, share(span), job, site)
        layers = layers_of(job.model, span.layers)
        parked = stages[span.swap.to].ranks[0] if span.swap else None
        for layer, count in alike(layers):
            time = layer_time(layer, config.cut, site.chip, site.fabric, site.runtime, config.place, span.recompute)
            kept = layer.kept_bytes(config.cut, span.recompute) if span.activations_here < 1 else 0.0
            found = layer_passes(layer, time, config, site, kept, parked)
            for total, part in ((spent, found.spent), (hidden, found.hidden)):
                for name, seconds in part.items():
                    total[name] += count * float(seconds)
            weight += count * float(found.weight_gradient)
        if before and grid(before) != grid(span):
            moved = relayout_seconds(site, float(layers[0].input_bytes(config.cut)), span.devices)
            for when in PASSES:
                spent[when, "relayout"] += moved
        before = span
    return StageTime(dict(spent), dict(hidden), weight)


def grid(span: Span) -> tuple[object, ...]:
    """Return the choices that place an activation: spans of one grid pass it on without a change of layout."""
    return span.dp, span.tp, span.sp, span.ulysses, span.ring, span.order


def relayout_seconds(site: StagePlacement, moved: float, devices: int) -> float:
    """Return the seconds to change the cut of activations (batch, sequence, width): an all-to-all over the stage."""
    return float(exchange_seconds(site.fabric, moved, devices, site.everyone))
