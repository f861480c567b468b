"""Price compressed gradients.

A codec states the compressed size of a gradient, and the device's time to encode and decode it. A runtime lists the
codecs that a search may choose (`Runtime.codecs`). A plan names layers and one codec (`Plan.compression`).

Compression changes gradients, so a search uses it only on request: no runtime lists codecs. The catalogue here holds
the codecs of our own runtime. It prices plans that name one, and `offering` lets a search choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from meshwright.clusters import Device
from meshwright.plans import Job, Plan
from meshwright.plans.spans import layers_of

if TYPE_CHECKING:
    from meshwright.cost.runtime import Runtime


@dataclass(frozen=True)
class Codec:
    """One way to compress gradients.

    >>> Codec("fp8", part=0.25, seconds_per_byte=1e-12).seconds(travel=1.0, moved=1e9)
    0.251
    """

    name: str
    part: float  # compressed bytes per byte of the gradient
    seconds_per_byte: float = 0.0  # of the gradient, to encode before and decode after communication

    def seconds(self, travel: float, moved: float) -> float:
        """Return the seconds of a gradient of `moved` bytes that takes `travel` seconds uncompressed."""
        return self.part * travel + self.seconds_per_byte * moved


# Parts are of float32, the type of our runtime's all-reduce. Seconds (topology `scatter`) are of one encoding and two
# decodings of every number. Measured on one core of a server (AMD EPYC, the C back end) ...
_ON_PROCESSORS = (
    Codec("bf16", 0.5, 1.2e-10),
    Codec("fp16", 0.5, 3.3e-10),
    Codec("int8", 0.254, 1.7e-10),
    Codec("int4", 0.129, 1.8e-10),
)
# ... and estimated on accelerators: kernels read and write device memory as often as on an H200. There one encoding and
# two decodings of 256 MiB took 0.86e-12 to 1.16e-12 s per byte of the gradient at 4.8 TB/s (docs/measurements.md).
# Messages go through host memory, each way there and back.
KERNEL_BYTES = 5.5  # of device memory traffic, per byte of the gradient
HOST_COPIES = 2  # of the data that leaves a device, about as much as arrives


def kernel_seconds(device: Device) -> float:
    """Return an accelerator's seconds to encode one byte of a gradient and decode it twice.

    >>> from meshwright import Cluster
    >>> f"{kernel_seconds(Cluster.preset('1xh200').device(0)):.2g}"
    '1.1e-12'
    """
    return KERNEL_BYTES / device.memory_bandwidth


def catalogue(job: Job) -> tuple[Codec, ...]:
    """Return codecs with small loss, as our runtime runs them on a job's devices; the slowest of several kinds.

    >>> from meshwright import Cluster, Model
    >>> [codec.name for codec in catalogue(Job(Model.preset("tiny-llama"), Cluster.preset("2xcpu"), 4))]
    ['bf16', 'fp16', 'int8', 'int4']
    """
    devices = [group.device for group in job.cluster.groups]
    if any(device.architecture == "cpu" for device in devices):
        return _ON_PROCESSORS
    kernels, host = max(map(kernel_seconds, devices)), min(device.host_bandwidth for device in devices)
    # Each process sends two messages: one to the owners of parts, one to the receivers of sums.
    copies = 2 * HOST_COPIES / host
    return tuple(Codec(codec.name, codec.part, kernels + copies * codec.part) for codec in _ON_PROCESSORS)


def offering(job: Job, runtime: Runtime) -> Runtime:
    """Return the runtime with codecs that a search may choose: use `plan(job, offering(job, runtime))`."""
    return replace(runtime, codecs=catalogue(job))


def codecs_of(job: Job, plan: Plan, runtime: Runtime) -> Mapping[str, Codec]:
    """Return the codec of every layer whose gradients the runtime can compress as the plan states, by name."""
    ours = catalogue(job) if runtime.name == "meshwright" else ()
    known = {codec.name: codec for codec in (*ours, *runtime.codecs)}
    return {
        layer.name: known[rule.algorithm]
        for rule in plan.compression
        if rule.algorithm in known
        for layer in layers_of(job.model, rule.layers)
    }
