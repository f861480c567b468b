"""Placement of a stage: the chip, the links, the framework, and the devices that an axis joins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshwright.clusters import Cluster, Device, Link
from meshwright.clusters.measurements import Measured
from meshwright.cost.constants import Constants, seen_on
from meshwright.cost.layers.collectives import Counts, Fabric
from meshwright.cost.layers.layer import Placement
from meshwright.cost.layers.operators import Chip
from meshwright.cost.layers.rank_groups import counts, placement, replicas
from meshwright.cost.runtime import Runtime
from meshwright.models import precision
from meshwright.plans import Job, Span


@dataclass(frozen=True)
class StagePlacement:
    """Placement of a stage: its devices, the chip, the links, the framework."""

    cluster: Cluster
    ranks: tuple[int, ...]
    device: Device
    chip: Chip
    fabric: Fabric
    runtime: Runtime
    constants: Constants
    precision: str
    host: float  # bytes/s to or from host memory
    host_update: float  # bytes/s at which this device's part of the host updates offloaded states
    shard: float  # the host's seconds to gather or to scatter a sharded layer, if measured
    _known: dict[tuple[object, ...], tuple[Placement, Counts, Counts]] = field(default_factory=dict, compare=False)

    @staticmethod
    def of(job: Job, ranks: tuple[int, ...], where: int, runtime: Runtime, constants: Constants) -> StagePlacement:
        """Return one kind of device of a stage; the slowest link joins a stage that spans groups of nodes."""
        home = job.cluster.groups[where]
        touched = sorted({job.cluster.group_index(rank) for rank in (min(ranks), max(ranks))})
        fabric = Fabric.of(home, constants, between(job.cluster, touched) if len(touched) > 1 else None)
        seen = home.device.measured or Measured()
        chip = Chip.of(home.device, job.precision, runtime, constants)
        host = seen.host or max(home.device.host_bandwidth, 1e9) * constants.host_copy
        update = seen.host_update or constants.host_memory / home.devices_per_node
        runtime = runtime.on(home.device)
        own = runtime.name == "meshwright"  # it issued the measured kernels and sharded the measured layers
        if own and seen.launch is not None:
            runtime = replace(runtime, host_seconds=seen.launch)
        constants = seen_on(home.device, constants)
        return StagePlacement(
            job.cluster,
            ranks,
            home.device,
            chip,
            fabric,
            runtime,
            constants,
            job.precision,
            host,
            update,
            (seen.shard or 0.0) / 3 if own else 0.0,  # measured: two gathers and one scatter
        )

    def joined(self, span: Span) -> tuple[Placement, Counts, Counts]:
        """Return the members of each axis of a span, of its replicas and of its experts' replicas, by tier."""
        key = (span.dp, span.tp, span.ulysses, span.ring, span.ep, span.etp, span.order)
        if key not in self._known:
            where = (self.cluster, span, self.ranks, self.fabric)
            self._known[key] = (placement(*where), *replicas(*where))
        return self._known[key]

    @property
    def everyone(self) -> Counts:
        """Group of all devices of the stage."""
        return counts(self.cluster, self.ranks, list(range(len(self.ranks))), self.fabric)

    @property
    def parameter_bytes(self) -> float:
        """Bytes of one communicated parameter: as the runtime casts it, or wider if the job trains wider."""
        return max(self.runtime.gather_bytes, precision(self.precision).parameter)

    @property
    def gradient_bytes(self) -> float:
        """Bytes of one communicated gradient element."""
        return max(self.runtime.gradient_bytes, precision(self.precision).activation)


def between(cluster: Cluster, groups: Sequence[int]) -> Link:
    """Return the link that joins some groups of nodes."""
    return cluster.between or min((cluster.groups[g].network for g in groups), key=lambda link: link.bandwidth)
