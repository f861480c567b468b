"""Time the layers of a real model on this device, and compare them with the prediction."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshwright.clusters import Cluster
from meshwright.cost.constants import DEFAULT, seen_in
from meshwright.cost.layers.layer import layer_time
from meshwright.cost.layers.layer_config import LayerConfig
from meshwright.cost.layers.passes import BACKWARD_KERNELS, layer_passes
from meshwright.cost.layers.placement import StagePlacement
from meshwright.cost.runtime import runtime
from meshwright.measurement.samples import TYPES, Sample, Scale
from meshwright.measurement.timing import Timing, timed
from meshwright.models import Layer, Model
from meshwright.plans import Job, Plan
from meshwright.plans.spans import alike
from meshwright.run.memory.recompute import recompute
from meshwright.run.models import Context, Decoder, build


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch in a layer, and bytes that it keeps for its backward pass."""

    forward: float
    backward: float
    repeated: float  # the backward pass with recompute of the forward pass
    kept: float


@dataclass(frozen=True)
class Compared:
    """One kind of layer: its count in the model, the predicted passes and the measured ones."""

    name: str
    count: int
    expected: Passes
    seen: Passes
    spread: float


def compare(job: Job, device: str, on_layer: Callable[[str], None] = lambda name: None) -> Iterator[Compared]:
    """Compare every kind of layer of the job's model on one device, with all samples of a step at once."""
    plan = Plan.of({"micro_batches": 1, "dp": 1}, job)
    (span,) = plan.pipelines[0].stages[0].spans
    site = StagePlacement.of(job, (0,), 0, runtime("meshwright"), seen_in(job.cluster, DEFAULT))
    for layer, count in alike(job.model.layers):
        on_layer(layer.name)
        ways = LayerConfig.of(span, job.global_batch, job, site)
        price = layer_time(layer, ways.cut, site.chip, site.fabric, site.runtime, ways.place, "full")
        found = layer_passes(layer, price, ways, site)
        again = float(found.spent["backward", "recompute"])
        behind = float(found.total("backward"))
        kept = float(layer.kept_bytes(ways.cut))
        seen, spread = _seen(layer, job, device)
        yield Compared(
            layer.name, count, Passes(float(found.total("forward")), behind - again, behind, kept), seen, spread
        )


def _seen(layer: Layer, job: Job, device: str) -> tuple[Passes, float]:
    """Return measured passes of a layer with fresh weights and random input."""
    kind = TYPES.get(job.precision, torch.bfloat16)
    decoder = build(job.model, [layer], device=device).to(kind)
    tokens = torch.randint(0, 100, (job.global_batch, job.seq_len), device=device)
    context = Context.of(tokens)
    x = tokens if layer.kind == "embedding" else _random(job, decoder, device, kind)
    once = timed(lambda: _without_gradients(decoder, x, context, tokens), device)
    both = timed(lambda: _both(decoder, x, context, tokens), device)
    kept = _kept(decoder, x, context, tokens)
    again = both
    if layer.block:
        recompute(decoder, {layer: "full"})
        again = timed(lambda: _both(decoder, x, context, tokens), device)
    behind, repeated = (max(timing.seconds - once.seconds, 0.0) for timing in (both, again))
    return Passes(once.seconds, behind, repeated, kept), max(once.spread, both.spread)


def _random(job: Job, decoder: Decoder, device: str, kind: torch.dtype) -> Tensor:
    shape = (job.global_batch, job.seq_len, decoder.hidden)
    return torch.randn(shape, device=device, dtype=kind, requires_grad=True)


def _result(decoder: Decoder, x: Tensor, context: Context, tokens: Tensor) -> Tensor:
    found: Tensor = decoder(x, context, tokens)
    return found


def _without_gradients(decoder: Decoder, x: Tensor, context: Context, tokens: Tensor) -> None:
    with torch.no_grad():
        _result(decoder, x, context, tokens)


def _both(decoder: Decoder, x: Tensor, context: Context, tokens: Tensor) -> None:
    found = _result(decoder, x, context, tokens)
    found.backward(torch.ones_like(found))
    x.grad = None
    for weight in decoder.parameters():
        weight.grad = None


def _kept(decoder: Decoder, x: Tensor, context: Context, tokens: Tensor) -> float:
    """Return the bytes that autograd saves, each storage once, without weights and without what the loss saves."""
    own = {weight.untyped_storage().data_ptr() for weight in decoder.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = _result(decoder, x, context, tokens)
    del found
    return float(sum(held.values()))


def host_seconds(device: str) -> Timing:
    """Time the host while it issues one kernel of our runtime: tiny blocks, divided by the kernels they count as."""
    job = _blocks(device, 64, 8)
    layers, run = _ready(job, device)
    found = timed(run, device, 0.5)
    ours = runtime("meshwright")
    (span,) = Plan.of({"micro_batches": 1}, job).pipelines[0].stages[0].spans
    site = StagePlacement.of(job, (0,), 0, ours, DEFAULT)
    ways = LayerConfig.of(span, 1, job, site)
    prices = [layer_time(one, ways.cut, site.chip, site.fabric, ours, ways.place) for one in layers]
    issued = sum(float(price.work.kernels) for price in prices) * site.runtime.kernels * (1 + BACKWARD_KERNELS)
    return Timing(found.seconds / issued, found.spread)


def blocks(scale: Scale, device: str) -> Iterator[Sample]:
    """Time both passes of whole blocks: kernels one after the other, with caches as they leave them."""
    for width, tokens in scale.blocks:
        _, run = _ready(_blocks(device, width, tokens), device)
        yield Sample("block", {"width": width, "tokens": tokens}, timed(run, device, 0.5))


def beside_kernels(samples: Sequence[Sample], cluster: Cluster, device: str) -> float:
    """Return the time of blocks relative to the time that a cluster's measured rates predict for their kernels."""
    found = []
    for sample in samples:
        job = replace(_blocks(device, int(sample.facts["width"]), int(sample.facts["tokens"])), cluster=cluster)
        (span,) = Plan.of({"micro_batches": 1, "dp": 1}, job).pipelines[0].stages[0].spans
        site = StagePlacement.of(job, (0,), 0, runtime("meshwright"), DEFAULT)
        ways = LayerConfig.of(span, 1, job, site)
        own = host = 0.0
        for layer in (layer for layer in job.model.layers if layer.block):
            price = layer_time(layer, ways.cut, site.chip, site.fabric, site.runtime, ways.place)
            for (_, name), seconds in layer_passes(layer, price, ways, site).spent.items():
                host, own = host + float(seconds) * (name == "host"), own + float(seconds) * (name != "host")
        found.append(max(sample.timing.seconds - host, own / 2) / own)
    return statistics.geometric_mean(found)


def shard_seconds(device: str) -> Timing:
    """Time what `fully_shard` adds to both passes of a tiny layer, over all ranks."""
    job = _blocks(device, 64, 8)
    layers, plain = _ready(job, device)
    mesh = init_device_mesh(device.partition(":")[0], (dist.get_world_size(),))
    _, sharded = _ready(job, device, lambda module: fully_shard(module, mesh=mesh))
    samples = []
    for _ in range(9):
        with_, without = (_lasting(run, device) for run in (sharded, plain))
        samples.append(max(with_ - without, 1e-7) / len(layers))
    return Timing.of(samples)


def _lasting(run: Callable[[], None], device: str) -> float:
    """Return the seconds of one run, out of several that all ranks begin together."""
    run()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(5):
        run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / 5


def reserved_beside_tensors(device: str) -> float:
    """Return what CUDA's allocator reserves beyond the peak of tensors, as a share of it, while blocks run."""
    torch.cuda.empty_cache()
    _, run = _ready(_blocks(device, 2048, 8192), device)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        run()
    most, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return float(reserved / most - 1)


def _blocks(device: str, width: int, length: int) -> Job:
    """Return a job with four blocks of a Llama."""
    config = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": width, "intermediate_size": 4 * width,
        "num_hidden_layers": 4, "num_attention_heads": max(width // 128, 2), "max_position_embeddings": length,
    }  # fmt: skip
    precision = "bf16" if device.startswith("cuda") else "fp32"
    return Job(Model.from_config(config), Cluster.preset("1xcpu"), 1, length, precision)


def _ready(
    job: Job, device: str, each: Callable[[Any], object] | None = None
) -> tuple[list[Layer], Callable[[], None]]:
    """Return the blocks of a model, and a function that runs both passes; `each` may first change their layers."""
    layers, kind = [layer for layer in job.model.layers if layer.block], TYPES[job.precision]
    decoder = build(job.model, layers, device=device).to(kind)
    for layer in layers if each else ():
        each(decoder.layer(layer.name))  # type: ignore[misc]
    tokens = torch.zeros(1, job.seq_len, dtype=torch.long, device=device)
    x, context = _random(job, decoder, device, kind), Context.of(tokens)
    return layers, lambda: _both(decoder, x, context, tokens)
