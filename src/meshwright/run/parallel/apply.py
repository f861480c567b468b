"""(model, plan, process) -> what this process trains, in one readable order.

1. build the own layers of every span, without memory
2. cut them: heads, widths, vocabulary, experts
3. mark the operators that the backward pass repeats, and what is kept elsewhere until then
4. shard what replicas hold alike (ZeRO), and find whose gradients travel compressed
5. give them memory and values, a parameter at a time
6. join spans and stages by bridges
7. hand the stages and the plan's table to the executor
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.errors import InputError
from meshwright.models import Model
from meshwright.plans import Pipeline, Plan, Span
from meshwright.plans.spans import layers_of
from meshwright.plans.strategy import Offload
from meshwright.run.memory.offload import Moves, Place, offload
from meshwright.run.memory.offload_share import OffloadShare, keep_on_host
from meshwright.run.memory.recompute import recompute
from meshwright.run.mesh.collectives import ALONE, AxisGroup
from meshwright.run.mesh.mesh import ONE, Groups, SpanMesh
from meshwright.run.mesh.shards import Layout
from meshwright.run.models import Decoder, fresh
from meshwright.run.models.balance import Balance
from meshwright.run.models.numerics import numerics
from meshwright.run.parallel.compression import Rules, Synchronisers, compress_shards, compressed, rules_of
from meshwright.run.parallel.ddp import BucketedAllReduce
from meshwright.run.parallel.executor import Executor, halved
from meshwright.run.parallel.fsdp import shard
from meshwright.run.parallel.parallel_model import Parallel
from meshwright.run.parallel.redistribute import Bridge, Holding
from meshwright.run.parallel.refusals import refuse, refuse_balance
from meshwright.run.parallel.replica_sync import ReplicaSync
from meshwright.run.parallel.stage import SpanPart, Stage
from meshwright.run.parallel.tensor_parallel import cut, partial
from meshwright.run.torch_private import group_timeout

Values = Callable[[str, Sequence[int]], Tensor]  # the whole value of a parameter, by name and shape
Holdings = list[dict[int, Holding]]  # of every span of a stage, by process


@dataclass(frozen=True)
class _How:
    """Facts that all spans share."""

    model: Model
    plan: Plan
    device: str
    dtype: torch.dtype
    value: Values
    seed: int
    balance: Balance
    lora: int
    rules: Rules  # of gradients that travel compressed
    ranks: dict[int, int]  # of the plan's devices
    me: int
    alone: AxisGroup

    def first(self, key: str, shape: Sequence[int]) -> Tensor:
        """A parameter's first value: all copies begin with the same numbers, kept in 16 bits or in float32. A router's
        correction, which is no parameter, always is in float32."""
        value = self.value(key, shape)
        return value if key.endswith(".correction") else value.to(self.dtype)


def apply(
    model: Model,
    plan: Plan,
    *,
    seed: int = 0,
    groups: Groups | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    values: Values | None = None,
    lora: int = 0,
    balance: Balance = "sample",
) -> Parallel:
    """Build what this process runs of a plan; fresh weights are the same under every plan.

    Every process of the plan calls it. `groups` keeps process groups for a later plan on the same processes; `values`
    gives parameters other first values; `lora` trains adapters of that rank instead of the weights; `balance` says of
    what the balance loss of a mixture is.
    """
    refuse(plan)
    refuse_balance(plan, balance)
    facts = numerics(model)
    value = values or (lambda key, shape: fresh(key, shape, facts.initializer, seed))
    ranks = {device: rank for rank, device in enumerate(plan.used)}
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != len(ranks):
        raise InputError(
            f"there are {world} processes", field="plan", valid=f"{len(ranks)}, one for each of its devices"
        )
    groups = {} if groups is None else groups
    alone = _alone(plan, groups)
    me = dist.get_rank() if dist.is_initialized() else 0
    how = _How(model, plan, device, dtype, value, seed, balance, lora, rules_of(model, plan), ranks, me, alone)
    mine: dict[int, dict[int, list[SpanPart]]] = {}  # spans of this process, by pipeline and stage
    holdings: dict[tuple[int, int], Holdings] = {}
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            members = tuple(ranks[device] for device in stage.ranks)
            for i, spans in enumerate(_cut_alike(stage.spans)):
                mesh = _span_mesh(how, pipeline, spans, members, groups)
                held = {
                    rank: Holding.of(spans[0], at, pipeline.samples, plan.job.seq_len)
                    for at, rank in enumerate(members)
                }
                holdings.setdefault((p, s), []).append(held)
                if me in members:
                    found = _span(how, (p, s, i), pipeline, spans, mesh, members.index(me))
                    found.holdings = held
                    mine.setdefault(p, {}).setdefault(s, []).append(found)
    ((number, stages),) = mine.items()
    for some in stages.values():
        for before, after in pairwise(some):
            after.enter = _bridges(before.holdings, after.holdings, me)
    every = [span for some in stages.values() for span in some]
    held_here = {s: held for (p, s), held in holdings.items() if p == number}
    executor = _executor(how, plan.pipelines[number], stages, held_here)
    return Parallel(plan, number, every, executor, ReplicaSync(every, how.device))


def _span_mesh(
    how: _How, pipeline: Pipeline, spans: Sequence[Span], members: tuple[int, ...], groups: Groups
) -> SpanMesh:
    kv_heads = {layer.kv_heads for span in spans for layer in layers_of(how.model, span.layers)}
    mesh = SpanMesh.of(spans[0], members, groups, kv_heads) if len(members) > 1 else ONE
    # Where backward passes come in halves, sums in chunks would be computed once per half.
    whole = halved(pipeline) or spans[0].tp == 1
    return replace(mesh, chunks=1 if whole else how.plan.overlap.tensor_chunks, alone=how.alone)


def _alone(plan: Plan, groups: Groups) -> AxisGroup:
    """This process as a group: PyTorch's sharding over it brings whole parameters up from the host."""
    spans = [span for pipeline in plan.pipelines for stage in pipeline.stages for span in stage.spans]
    if not any(span.offload.parameters for span in spans):
        return ALONE
    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    if "alone" not in groups:
        groups["alone"] = dist.new_subgroups(1, timeout=group_timeout())[0]
    return AxisGroup(1, 0, groups["alone"])


def _cut_alike(spans: Sequence[Span]) -> list[list[Span]]:
    """Neighbours that differ only in what they shard, repeat or keep elsewhere: they are one decoder, so that parameters
    of the next are gathered under the one before."""
    found: list[list[Span]] = []
    for span in spans:
        if found and _grid(span) == _grid(found[-1][0]):
            found[-1].append(span)
        else:
            found.append([span])
    return found


def _grid(span: Span) -> Span:
    """A span without what is said of every layer on its own."""
    return msgspec.structs.replace(span, layers="", zero=0, recompute="none", offload=Offload(), swap=None)


def _span(
    how: _How, number: tuple[int, int, int], pipeline: Pipeline, spans: Sequence[Span], mesh: SpanMesh, position: int
) -> SpanPart:
    """Build the part of this rank of spans with one mesh."""
    layers = {layer: span for span in spans for layer in layers_of(how.model, span.layers)}
    overlap, sharded = how.plan.overlap, mesh.shards.axis.size > 1
    with torch.device("meta"):
        decoder = Decoder(list(layers), numerics(how.model))
    if how.lora:
        decoder.adapt(how.lora)
    zero = {layer.name: span.zero if sharded else 0 for layer, span in layers.items()}
    # Shards are float32 and gathered in the type that is computed in: they need no other copy that is updated.
    layouts = cut(decoder, mesh, torch.float32 if any(zero.values()) else how.dtype)
    recompute(decoder, {layer: span.recompute for layer, span in layers.items()})
    moves = Moves()
    for span in spans:
        if places := _places(how, pipeline, span, position):
            offload(decoder, places, [layer.name for layer in layers_of(how.model, span.layers)], moves)
    sharding = None
    if any(zero.values()) or any(span.offload.parameters for span in spans):
        shares = {id(span): OffloadShare(span.offload.parameters) for span in spans}
        away = {layer.name: shares[id(span)] for layer, span in layers.items()}
        split, ahead, packed = halved(pipeline), overlap.parameters, compressed(decoder, mesh, layouts, how.rules)
        sharding = shard(
            decoder, mesh, zero, how.device, how.dtype, split=split, ahead=ahead, away=away, compressed=packed
        )
    hosted = sharding.hosted if sharding else set()
    _fill(decoder, layouts, how.device, hosted, how.first)
    if pipeline.micro_batches > 1 or how.dtype == torch.float16:
        _add_up_wide(decoder)
    for key, module, kind in decoder.named():
        getattr(module, kind).key = key
    _keep_states(decoder, {layer.name: span for layer, span in layers.items()}, hosted)
    alike = max(mesh.replicas.size, mesh.expert_replicas.size) > 1
    ways = Synchronisers(compressed(decoder, mesh, layouts, how.rules))
    reduction = BucketedAllReduce(decoder, mesh, ways, early=overlap.gradients) if alike else None
    found = SpanPart(
        number, decoder, mesh, layouts, {}, sharding=sharding, reduction=reduction, early=overlap.gradients
    )
    found.partial = list(partial(decoder, mesh))
    found.synchronisers = [*ways.made, *compress_shards(decoder, mesh, ways.rules)]
    return found


def _keep_states(decoder: Decoder, spans: dict[str, Span], hosted: set[str]) -> None:
    """Optimizer states of so many parameters of every span on the host."""
    there = {weight for name, weight in decoder.named_parameters() if name in hosted}
    seen: set[Tensor] = set()
    for span in {id(span): span for span in spans.values()}.values():
        names = [name for name, of in spans.items() if of is span]
        own = dict.fromkeys(weight for name in names for weight in decoder.layer(name).parameters())
        keep_on_host([weight for weight in own if weight not in seen], span.offload.optimizer, always=there)
        seen |= set(own)


def _places(how: _How, pipeline: Pipeline, span: Span, position: int) -> list[Place]:
    """Return where activations of a span go: to the host, or to a device of another stage on the same node."""
    found = [Place("cpu", OffloadShare(span.offload.activations))] if span.offload.activations else []
    if span.swap:
        peers = [how.ranks[each] for each in pipeline.stages[span.swap.to].ranks]
        peer, neighbours = peers[position % len(peers)], _neighbours(how.me)
        if not how.device.startswith("cuda"):  # one memory for all processes: a copy stands for the way to the other
            return [*found, Place("cpu", OffloadShare(span.swap.activations))]
        if peer not in neighbours:
            problem = f"stage {span.swap.to} is on another node"
            raise InputError(problem, field="swap.to", valid="a stage on the same node")
        found.append(Place(f"cuda:{neighbours.index(peer)}", OffloadShare(span.swap.activations)))
    return found


def _neighbours(me: int) -> range:
    """The processes of this node, whose i-th works on device i. Launchers say who they are: nodes may differ in size."""
    count = max(torch.cuda.device_count(), 1)
    first = me - int(os.environ.get("LOCAL_RANK", me % count))
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", count)))


@torch.no_grad()
def _fill(decoder: Decoder, layouts: dict[str, Layout], device: str, hosted: set[str], value: Values) -> None:
    """Memory on the device or the host, and values of the own pieces, of one whole parameter at a time."""
    for name, module in list(decoder.named_modules())[::-1]:
        own = {f"{name}.{kind}".lstrip(".") for kind, _ in module.named_parameters(recurse=False)}
        module.to_empty(device="cpu" if own & hosted else device, recurse=False)
        for kind, buffer in module.named_buffers(recurse=False):
            setattr(module, kind, buffer.to(device))
    for key, module, kind in decoder.named():
        whole = value(key, layouts[key].shape)
        for box, piece in layouts[key].pieces(getattr(module, kind).data):
            piece.copy_(whole[tuple(slice(*interval) for interval in box)])
    if decoder.tied:
        decoder.layer("head").weight = decoder.layer("embed").tokens.weight


def _add_up_wide(decoder: Decoder) -> None:
    """Gradients of many micro-batches are summed in float32, as `fully_shard` does for what it shards; those of float16
    are divided by the loss scale in it."""
    for weight in decoder.parameters():
        if weight.requires_grad and not isinstance(weight, DTensor):
            weight.grad_dtype = torch.float32


def _bridges(before: dict[int, Holding], after: dict[int, Holding], me: int) -> tuple[Bridge, Bridge]:
    return Bridge.of(before, after, me), Bridge.of(after, before, me)


def _executor(
    how: _How, pipeline: Pipeline, stages: dict[int, list[SpanPart]], holdings: dict[int, Holdings]
) -> Executor:
    count, split = len(pipeline.stages), halved(pipeline)
    made = [
        Stage(
            spans,
            s,
            count,
            how.me,
            seed=how.seed,
            balance=how.balance,
            micro_batches=pipeline.micro_batches,
            halved=split,
        )
        for s, spans in stages.items()
    ]
    borders = {border for s in stages for border in (s - 1, s) if 0 <= border < count - 1}
    bridges = {s: _bridges(holdings[s][-1], holdings[s + 1][0], how.me) for s in borders}
    like = torch.empty(0, 0, made[0].spans[0].decoder.hidden, dtype=how.dtype, device=how.device)
    return Executor(pipeline, made, bridges, like, ahead=how.plan.overlap.pipeline)
