"""ZeRO by PyTorch's `fully_shard`: states of the replicas cut into as many pieces.

Level 3 frees gathered parameters after every layer; level 2 keeps them until the backward pass is over and scatters
gradients of every micro-batch; level 1 keeps whole gradients until the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from meshwright.run.memory.offload_share import OffloadShare
from meshwright.run.mesh.mesh import Shards, SpanMesh
from meshwright.run.models import Decoder
from meshwright.run.models.mixture import Mixture
from meshwright.run.torch_private import finish_reduction, gather_in_background


@dataclass(frozen=True)
class _Unit:
    """Parameters that are gathered and scattered as one."""

    module: nn.Module
    weights: frozenset[Tensor]
    shards: Shards
    level: int  # of ZeRO; 0: every replica has them whole
    on_host: bool

    @property
    def moves(self) -> bool:
        """Return True if they must be gathered or fetched before their use."""
        return self.level > 0 or self.on_host


@dataclass(frozen=True)
class Sharding:
    """Parameters of a decoder that are gathered or fetched before their use."""

    hosted: set[str]  # names of the parameters that live in host memory
    levels: list[tuple[FSDPModule, int]]  # of ZeRO, of everything that is gathered as one


def shard(
    decoder: Decoder,
    mesh: SpanMesh,
    zero: Mapping[str, int],
    device: str,
    dtype: torch.dtype,
    *,
    split: bool = False,
    ahead: bool = True,
    away: Mapping[str, OffloadShare] | None = None,
    compressed: Collection[int] = (),
) -> Sharding:
    """Every layer of a block on its own, its experts over their own replicas; what stands before and after the blocks
    together, where weights may be tied.

    `zero` says the level of every layer; what stands before and after the blocks has the highest of its own.
    Backward passes in two halves (`split`) need parameters that stay gathered from the first forward to the last half.
    `ahead`: a layer's parameters are gathered while the one before computes.
    So much of the parameters as `away` says of a layer lives in host memory, with gradients and states, and comes up for
    every use: the own shards, or the whole where there are none.
    Copies of shards that hold something `compressed` (parameters by their identity) are summed by others than PyTorch.
    """
    units = list(_units(decoder, mesh, zero, away or {}))
    hosted = {weight for unit in units if unit.on_host for weight in unit.weights}
    names = {name for name, weight in decoder.named_parameters(remove_duplicate=False) if weight in hosted}
    still = {weight for unit in units if not unit.moves for weight in unit.weights}
    if any(zero.values()):
        still = _narrowed(decoder, still, dtype)
    kinds = MixedPrecisionPolicy()
    if dtype != torch.float32:
        # Halves of backward passes leave gradients in the type that is computed in: they are summed as they are.
        kinds = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype if split else torch.float32)
    some = next(unit for unit in units if unit.moves)
    for unit in units:
        if unit.moves or unit.module is decoder:
            fully_shard(
                unit.module,
                mesh=_mesh((unit if unit.moves else some).shards, device, unit.weights, compressed),
                reshard_after_forward=(unit.level == 3 or unit.on_host) and not split,
                ignored_params=still,
                offload_policy=CPUOffloadPolicy(pin_memory=device != "cpu") if unit.on_host else OffloadPolicy(),
                mp_policy=kinds,
            )
    for module in sharded(decoder):  # losses are sums already divided by all tokens: gradients add up
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        if split:
            module.set_reshard_after_backward(False, recurse=False)
        if not ahead:
            module.set_modules_to_backward_prefetch([])
        elif device == "cpu":  # which has no streams for collectives to run on
            gather_in_background(module)
    blocks = [module for module in map(decoder.layer, decoder.names) if isinstance(module, FSDPModule)]
    for module, following in pairwise(blocks) if ahead else ():
        module.set_modules_to_forward_prefetch([following])
    level = {id(unit.module): unit.level for unit in units}
    return Sharding(names, [(module, level[id(module)]) for module in sharded(decoder)])


def _units(
    decoder: Decoder, mesh: SpanMesh, zero: Mapping[str, int], away: Mapping[str, OffloadShare]
) -> Iterator[_Unit]:
    names = [name for name in decoder.names if name.startswith("block.")]
    ends = [name for name in decoder.names if name not in names]
    mixtures = [name for name in names if isinstance(decoder.layer(name), Mixture)]
    modules = [(decoder.layer(name).experts, [name]) for name in mixtures]
    modules += [(decoder.layer(name), [name]) for name in names] + [(decoder, ends)]
    seen = set[Tensor]()
    for i, (module, layers) in enumerate(modules):
        weights = frozenset(module.parameters()) - seen
        seen |= weights
        replicas, shards = mesh.replicas, mesh.shards
        if i < len(mixtures):
            replicas, shards = mesh.expert_replicas, mesh.expert_shards
        level = max((zero[name] for name in layers), default=0) if replicas.size > 1 else 0
        if not level:  # one piece, of which every replica has a copy
            ranks = [[rank] for row in shards.ranks for rank in row]
            shards = Shards(mesh.alone, replicas, ranks)
        share = next((away[name] for name in layers if name in away), None)
        size = sum(weight.numel() for weight in weights)
        yield _Unit(module, weights, shards, level, share is not None and size > 0 and share.takes(size))


def _narrowed(decoder: Decoder, weights: set[Tensor], dtype: torch.dtype) -> set[Tensor]:
    """Cast parameters that are not sharded to the type of the computation."""
    found = set[Tensor]()
    for module in decoder.modules():
        for kind, weight in list(module.named_parameters(recurse=False)):
            if weight in weights:
                setattr(module, kind, nn.Parameter(weight.to(dtype), requires_grad=weight.requires_grad))
                found.add(getattr(module, kind))
    return found


def _mesh(shards: Shards, device: str, weights: Iterable[Tensor], compressed: Collection[int]) -> DeviceMesh:
    """Replicas that share one set of shards; hybrid where there are several sets that PyTorch sums."""
    kind = torch.device(device).type
    if shards.copies.size == 1 or any(id(weight) in compressed for weight in weights):
        return DeviceMesh.from_group(shards.axis.group, kind)
    groups, every = [shards.copies.group, shards.axis.group], torch.tensor(shards.ranks)
    return DeviceMesh.from_group(groups, kind, mesh=every, mesh_dim_names=("copies", "shards"))


def sharded(decoder: Decoder) -> Iterator[FSDPModule]:
    """The parts that are gathered and scattered as one."""
    return (module for module in decoder.modules() if isinstance(module, FSDPModule))


def last_micro_batch(decoder: Decoder, sharding: Sharding, *, last: bool, late: bool = False) -> None:
    """Tell the parts whether the next backward pass sums gradients over the replicas; `late`: `finish` does that."""
    for module, level in sharding.levels:
        module.set_requires_gradient_sync((last or level > 1) and not late, recurse=False)
    decoder.set_is_last_backward(last and not late)


def finish(decoder: Decoder, *, gathered: bool) -> None:
    """Sum gradients over the replicas after the last backward pass; `gathered`: parameters were so for the whole step."""
    for module in sharded(decoder):
        module.set_requires_gradient_sync(True, recurse=False)
        module.set_reshard_after_backward(True, recurse=False)
    decoder.set_is_last_backward(True)
    finish_reduction(decoder)
    for module in sharded(decoder) if gathered else ():
        module.set_reshard_after_backward(False, recurse=False)


def no_gradient(weight: Tensor) -> Tensor:
    """Zeros, in the type that gradients of a parameter are kept in."""
    return torch.zeros_like(weight, dtype=weight.grad_dtype)
