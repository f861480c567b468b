"""Properties of training frameworks: the same plan takes a different time in each.

Most fields are documented features, on or off, or bytes that the code moves. Undocumented numbers, such as the host's
time per kernel, are fitted to the framework's published runs, and a comment says so.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from meshwright.clusters import Device
from meshwright.cost.compression import Codec
from meshwright.cost.constants import DEFAULT
from meshwright.errors import UnknownName
from meshwright.models import Slice
from meshwright.plans import Job, Span
from meshwright.plans.document import Overlap

AttentionKernel = Literal["unfused", "triton", "flash", "native"]


@dataclass(frozen=True)
class Runtime:
    """One framework that executes a plan."""

    name: str
    title: str
    attention: AttentionKernel = "native"  # score matrices in memory, FlashAttention-2, or the chip's best kernel
    # Passes of memory-bound operators over their tensors, 1 = one fused kernel. Eager PyTorch runs a norm, a gated
    # activation or a rotary embedding as several kernels, often with float32 in between.
    norm_passes: float = 1.0
    activation_passes: float = 1.0
    stream_passes: float = 1.0
    dispatch_passes: float = 1.0  # copies into and out of expert order; some are fused into the all-to-all
    loss_bytes: float = 18.0  # moved per logit, forward and backward (eager PyTorch: 45, measured)
    host_seconds: float = 8e-6  # time of the host to issue one kernel; the device waits if this is longer
    kernels: float = 1.0  # kernels per operator, relative to a fused implementation
    collective_kernels: float = 1.0  # kernels whose issue takes as long as one collective's
    # Communication
    tp_overlap: float = 0.0  # part of the tensor-parallel collectives overlapped with their products in chunks
    tp_backward_overlap: bool = True  # input gradients are communicated while weight gradients are computed (Megatron)
    overlap_gradients: bool = True  # gradients are reduced bucket by bucket during the backward pass
    overlap_parameters: bool = True  # sharded parameters are gathered ahead of their use
    overlap_pipeline: bool = True  # sends between stages do not block the sender
    balanced_ring: bool = True  # each device takes an early and a late piece of a causal sequence, so all work alike
    overlap_experts: float = 0.0  # part of the all-to-alls overlapped with other work
    one_copy_per_node: bool = False  # a token crosses the network once per node, however many experts it has there
    gradient_bytes: float = 4.0  # per element of communicated gradients
    accumulate_bytes: float = 4.0  # per element of accumulated gradients
    # One reduction and one broadcast per shard instead of collectives over all: host and network start each of them.
    shard_seconds: float = 0.0
    gather_bytes: float = 2.0  # per element of communicated parameters
    # Sharded parameters are their own float32 master copy, cast for communication (FSDP); else both are kept.
    one_copy_of_parameters: bool = False
    master_copy: bool = True  # 16-bit parameters have a float32 copy that the optimizer updates
    without_master: tuple[str, ...] = ()  # optimizers that update 16-bit parameters themselves, rounded at random
    # Gradients are made during the backward pass, in memory of freed activations; else they always exist.
    gradients_grow: bool = False
    flat_sums: bool = False  # replicas sum float32 copies of whole gradients, which stay until the last sum (ZeRO 0)
    narrow_gradients: bool = False  # without shards, gradients of one micro-batch have their weight's type
    receive_buffers: bool = False  # a pipeline stage holds one for every micro-batch, forward and backward (PyTorch)
    # The end of a step
    optimizer_bytes: float = 34.0  # moved per parameter: read and write two moments and the master copy, read gradient
    # Memory
    stops_early: bool = False  # a block is recomputed up to the last tensor that its backward pass needs
    loss_memory: float = 8.0  # bytes per logit at the peak of the loss: 16-bit logits, float32 copy, gradient
    loss_in_chunks: bool = False  # chunks of tokens: their gradients replace the logits, which never exist whole
    weight_gradient_buffers: bool = False  # a buffer per shape of weight beside the accumulated gradients
    optimizer_temporary: float = 0.0  # bytes per parameter that the optimizer step needs beside its states
    fragmentation: float = 0.05  # reserved beyond the peak of activations and temporaries
    context: float = 1.0e9  # bytes of the driver, kernels and communicators
    step_seconds: float = 2e-3  # exposed host work per step: logging, learning rate, loss synchronisation
    codecs: tuple[Codec, ...] = ()  # codecs with which it can compress gradients
    # Different values on CPUs: kernels, activation_passes, stream_passes, loss_bytes.
    on_processors: tuple[float, float, float, float] | None = None

    @property
    def fused_attention(self) -> bool:
        """True if the score matrix is never stored."""
        return self.attention != "unfused"

    def on(self, device: Device) -> Runtime:
        """Return the runtime on a device: kernels that are fused on accelerators are several on a CPU."""
        if device.architecture != "cpu" or self.on_processors is None:
            return self
        kernels, activation, stream, loss = self.on_processors
        return replace(
            self,
            kernels=kernels,
            activation_passes=activation,
            stream_passes=stream,
            loss_bytes=loss,
            overlap_gradients=False,  # `fully_shard` has no streams there: it waits for every collective
            overlap_parameters=False,
            on_processors=None,
        )

    def switched(self, overlap: Overlap) -> Runtime:
        """Return the runtime without the overlap that a plan switches off; it never adds overlap."""
        return replace(
            self,
            overlap_gradients=self.overlap_gradients and overlap.gradients,
            overlap_parameters=self.overlap_parameters and overlap.parameters,
            overlap_pipeline=self.overlap_pipeline and overlap.pipeline,
        )


_MEGATRON = Runtime(
    "megatron",
    "Megatron-Core with Transformer Engine, flags as by default: only input gradients overlap",
    overlap_gradients=False,
    overlap_parameters=False,
    overlap_pipeline=False,
    weight_gradient_buffers=True,
    loss_memory=4.0,
)
# Flags of an export to Megatron-LM: --overlap-grad-reduce and --overlap-param-gather, which a plan may switch off.
# Sends between stages stay exposed: Megatron overlaps them in its interleaved schedule only.
_MEGATRON_OVERLAP = replace(
    _MEGATRON,
    name="megatron-overlap",
    title="Megatron-Core with Transformer Engine; gradients and gathered parameters travel under the passes",
    overlap_gradients=True,
    overlap_parameters=True,
)
_MEGATRON_2021 = replace(
    _MEGATRON,
    name="megatron-2021",
    title="Megatron-LM of 2021: score matrices in memory, nothing hidden",
    attention="unfused",
    tp_backward_overlap=False,
    gradient_bytes=2.0,
    accumulate_bytes=2.0,
    # About 3 ms per block for the host, and a loss in many float32 kernels: from the grid of vTrain's measurements.
    kernels=2.7,
    host_seconds=26e-6,
    collective_kernels=2.5,
    loss_bytes=130.0,
    loss_memory=16.0,
)
_NEMO_2025 = replace(
    _MEGATRON,
    name="nemo-2025",
    title="NeMo recipes of 2024-25: chunked tensor parallelism, 16-bit gradients, everything but experts overlaps",
    tp_overlap=0.7,
    overlap_gradients=True,
    overlap_parameters=True,
    overlap_pipeline=True,
    overlap_experts=0.2,
    one_copy_per_node=True,
    gradient_bytes=2.0,
    accumulate_bytes=2.0,
    host_seconds=6e-6,
)
_NEMO = replace(
    _NEMO_2025,
    name="nemo",
    title="Megatron-Bridge recipes of 2026: as 2025, experts overlap too and copies are fused into their all-to-alls",
    overlap_experts=0.6,
    dispatch_passes=0.5,
)
_FSDP = Runtime(
    "fsdp",
    "PyTorch FSDP, eager, FlashAttention-2; norms, activations and rotary embeddings in several kernels",
    attention="flash",
    tp_backward_overlap=False,
    loss_bytes=45.0,
    loss_memory=16.0,
    one_copy_of_parameters=True,
    gradients_grow=True,
    receive_buffers=True,
    fragmentation=0.08,
    kernels=1.3,
    optimizer_bytes=60.0,
    step_seconds=5e-3,
)
_EAGER = replace(_FSDP, norm_passes=3.0, activation_passes=1.7, stream_passes=2.5)
_TORCHTITAN = replace(
    _FSDP,
    name="torchtitan",
    title="torchtitan, compiled; the loss never holds float32 logits",
    loss_bytes=27.0,
    loss_memory=6.0,
    kernels=0.7,
    optimizer_bytes=34.0,
)
RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        replace(
            _TORCHTITAN,
            name="meshwright",
            title="this project's own runtime: FSDP2, compiled blocks, loss in chunks",
            attention="native",
            loss_bytes=18.0,
            loss_in_chunks=True,
            without_master=("adamw-8bit",),
            flat_sums=True,
            narrow_gradients=True,
            stops_early=True,
            # Eager kernels, by their reads and writes: SwiGLU 5 tensors instead of 3; the loss in seven float32 passes.
            on_processors=(1.0, 5 / 3, 2.5, 48.0),
            step_seconds=2e-3,
        ),
        _MEGATRON,
        _MEGATRON_OVERLAP,
        _NEMO,
        _NEMO_2025,
        _TORCHTITAN,
        replace(
            _TORCHTITAN,
            name="torchtitan-2024",
            title="torchtitan of 2024, compiled; logits and their gradients in float32",
            loss_memory=12.0,
        ),
        replace(_EAGER, name="torchtitan-eager", title="torchtitan without compilation"),
        _EAGER,
        replace(
            _FSDP,
            name="automodel",
            title="NeMo AutoModel: FSDP2 with Transformer Engine, all states in 16 bits",
            attention="native",
            one_copy_of_parameters=False,
            master_copy=False,
            gradient_bytes=2.0,
            accumulate_bytes=2.0,
            loss_bytes=18.0,
            kernels=1.0,
            optimizer_bytes=34.0,
            one_copy_per_node=True,
        ),
        replace(
            _FSDP,
            name="composer",
            title="MosaicML Composer and llm-foundry of 2023: attention in Triton, casts around norms",
            attention="triton",
            norm_passes=2.0,
            loss_memory=4.0,
        ),
        replace(
            _EAGER,
            name="deepspeed",
            title="DeepSpeed ZeRO, eager, FlashAttention-2, 16-bit gradients",
            gradient_bytes=2.0,
            receive_buffers=False,
        ),
        replace(
            _FSDP,
            name="deepspeed-2022",
            title="DeepSpeed ZeRO-3 of 2022: score matrices in memory, 16-bit gradients",
            attention="unfused",
            gradient_bytes=2.0,
            receive_buffers=False,
            kernels=1.6,
        ),
        replace(
            _NEMO,
            name="maxtext",
            title="MaxText: XLA compiles the whole step",
            tp_overlap=0.5,
            host_seconds=0.0,
        ),
        replace(
            _MEGATRON,
            name="internevo",
            title="InternEvo: eager Megatron-like modules, FlashAttention-2, one collective per shard",
            attention="flash",
            norm_passes=2.0,
            activation_passes=1.7,
            stream_passes=2.0,
            kernels=1.4,
            loss_bytes=45.0,
            loss_memory=14.0,
            gradient_bytes=2.0,
            accumulate_bytes=2.0,
            # Its published study of shard groups: 2.6 ms per shard and step; 28 bytes per parameter at the peak.
            shard_seconds=2.6e-3,
            optimizer_temporary=12.0,
        ),
        replace(
            _MEGATRON_2021,
            name="megatron-2022",
            title="Megatron-LM of 2022: as 2021, but input gradients travel under weight gradients",
            tp_backward_overlap=True,
        ),
        _MEGATRON_2021,
    )
}


def cut_of(span: Span, samples: int, job: Job, runtime: Runtime) -> Slice:
    """Return the work of one device whose replica takes `samples`, with the runtime's kernels."""
    cut = span.cut(samples, job.seq_len, job.precision)
    return replace(cut, fused_attention=runtime.fused_attention, whole_logits=not runtime.loss_in_chunks)


def runtime(name: str) -> Runtime:
    """Return a runtime by name.

    >>> runtime("megatron").attention
    'native'
    """
    try:
        return RUNTIMES[name]
    except KeyError:
        raise UnknownName("runtime", name, RUNTIMES, see=", ".join(RUNTIMES)) from None


@cache
def calibration_version() -> str:
    """Return a digest of all constants of the cost model: plans say which ones they were made with."""
    return hashlib.sha256(repr((DEFAULT, RUNTIMES)).encode()).hexdigest()[:12]
