"""ZeRO by PyTorch's `fully_shard`: states of the replicas cut into as many pieces.

Level 3 frees gathered parameters after every layer; level 2 keeps them until the backward pass is over and scatters
gradients of every micro-batch; level 1 keeps whole gradients until the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from meshwright.run.lane import Lane, Shards
from meshwright.run.models import Decoder
from meshwright.run.models.mixture import Mixture
from meshwright.run.torch_private import finish_reduction, gather_in_background


def shard(
    decoder: Decoder,
    lane: Lane,
    zero: int,
    device: str,
    dtype: torch.dtype,
    *,
    split: bool = False,
    ahead: bool = True,
    on_host: bool = False,
) -> None:
    """Every layer of a block on its own, its experts over their own replicas; what stands before and after the blocks
    together, where weights may be tied.

    Backward passes in two halves (`split`) need parameters that stay gathered from the first forward to the last half.
    `ahead`: a layer's parameters are gathered while the one before computes.
    With `on_host` shards live in host memory, with their gradients and states, and come up to be gathered.
    """
    policy = CPUOffloadPolicy(pin_memory=device.startswith("cuda")) if on_host else OffloadPolicy()
    whole = _mesh(lane.shards, device)
    own = [decoder.layer(name) for name in decoder.names if name.startswith("block.")]
    parts: list[tuple[nn.Module, DeviceMesh]] = [(module, whole) for module in (*own, decoder)]
    mixtures = [module.experts for module in own if isinstance(module, Mixture)]
    if mixtures and lane.expert_replicas.size > 1:
        mesh = _mesh(lane.expert_shards, device)
        parts = [(experts, mesh) for experts in mixtures] + parts
    if lane.expert_replicas.size == 1:  # nobody else has them
        for experts in mixtures:
            for kind, weight in list(experts.named_parameters()):
                setattr(experts, kind, nn.Parameter(weight.to(dtype), requires_grad=weight.requires_grad))
    alone = set(decoder.experts()) if lane.expert_replicas.size == 1 else set()
    kinds = MixedPrecisionPolicy()
    if dtype != torch.float32:
        # Halves of backward passes leave gradients in the type that is computed in: they are summed as they are.
        kinds = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype if split else torch.float32)
    for module, mesh in parts:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=zero == 3 and not split,
            ignored_params=alone,
            offload_policy=policy,
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
    for module, following in pairwise(own) if ahead else ():
        module.set_modules_to_forward_prefetch([following])


def _mesh(shards: Shards, device: str) -> DeviceMesh:
    """Replicas that share one set of shards; hybrid where there are several sets."""
    if shards.copies.size == 1:
        return DeviceMesh.from_group(shards.line.group, device)
    groups, every = [shards.copies.group, shards.line.group], torch.tensor(shards.ranks)
    return DeviceMesh.from_group(groups, device, mesh=every, mesh_dim_names=("copies", "shards"))


def sharded(decoder: Decoder) -> Iterator[FSDPModule]:
    """The parts that are gathered and scattered as one."""
    return (module for module in decoder.modules() if isinstance(module, FSDPModule))


def last_micro_batch(decoder: Decoder, zero: int, *, last: bool, late: bool = False) -> None:
    """Tell the parts whether the next backward pass sums gradients over the replicas; `late`: `finish` does that."""
    for module in sharded(decoder):
        module.set_requires_gradient_sync((last or zero > 1) and not late, recurse=False)
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


def local(tensor: Tensor) -> Tensor:
    """The own shard, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
