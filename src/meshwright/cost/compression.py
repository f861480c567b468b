"""Gradients that travel compressed: the hook that the compression room fills in, priced like everything else.

A codec says how much of a gradient still travels and how long the device takes to shrink and restore it. A runtime
lists the codecs it can run (`Runtime.codecs`); a plan names layers and one of them (`Plan.compression`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.plan import Job, Plan
from meshwright.plan.spans import layers_of

if TYPE_CHECKING:
    from meshwright.cost.runtime import Runtime


@dataclass(frozen=True)
class Codec:
    """One way to compress gradients.

    >>> Codec("fp8", part=0.25, seconds_per_byte=1e-12).seconds(travel=1.0, moved=1e9)
    0.251
    """

    name: str
    part: float  # bytes that travel, of those of the gradient
    seconds_per_byte: float = 0.0  # of the gradient: to shrink it before and restore it after

    def seconds(self, travel: float, moved: float) -> float:
        """Of a gradient of `moved` bytes that would travel for `travel` seconds."""
        return self.part * travel + self.seconds_per_byte * moved


def codecs_of(job: Job, plan: Plan, runtime: Runtime) -> Mapping[str, Codec]:
    """The codec of every layer whose gradients the runtime can compress as the plan asks, by name."""
    known = {codec.name: codec for codec in runtime.codecs}
    return {
        layer.name: known[rule.algorithm]
        for rule in plan.compression
        if rule.algorithm in known
        for layer in layers_of(job.model, rule.layers)
    }
