"""Costs on an accelerator that is not here: legs and bytes as rehearsed on a processor, work as the cost model says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from meshwright.clusters import Device
from meshwright.compress.decide.choose import Costs
from meshwright.compress.decide.facts import Way
from meshwright.compress.decide.pipeline import Leg, Strand
from meshwright.cost.compression import HOST_COPIES, kernel_seconds


@dataclass(frozen=True)
class Accelerated:
    """What `decide` asks for. Kernels take a strand's work in the parts that its legs have on a processor; messages are
    copied to host memory and from there, which is part of a leg's work, since one thread starts both and waits."""

    costs: Costs
    device: Device

    def __call__(self, way: Way, shapes: tuple[tuple[int, ...], ...]) -> list[Strand]:
        strands = self.costs(way, shapes)
        if way.exact:  # the backend's own all-reduce, whose time is the link's
            return [tuple(replace(leg, work=0.0) for leg in strand) for strand in strands]
        rehearsed = sum(leg.work for strand in strands for leg in strand)
        kernels = 4 * sum(map(prod, shapes)) * kernel_seconds(self.device)
        return [tuple(self._leg(leg, kernels / rehearsed) for leg in strand) for strand in strands]

    def _leg(self, leg: Leg, faster: float) -> Leg:
        return replace(leg, work=leg.work * faster + HOST_COPIES * leg.sent / self.device.host_bandwidth)
