"""ZeRO by PyTorch's `fully_shard`: states of the replicas cut into as many pieces.

Level 3 frees gathered parameters after every layer; level 2 keeps them until the backward pass is over and scatters
gradients of every micro-batch; level 1 keeps whole gradients until the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from meshwright.run.lane import Lane
from meshwright.run.models import Decoder
from meshwright.run.models.mixture import Mixture


def shard(decoder: Decoder, lane: Lane, zero: int, device: str) -> None:
    """Every layer of a block on its own, its experts over their own replicas; what stands before and after the blocks
    together, where weights may be tied."""
    whole = DeviceMesh.from_group(lane.replicas.group, device)
    own = [decoder.layer(name) for name in decoder.names if name.startswith("block.")]
    parts: list[tuple[nn.Module, DeviceMesh]] = [(module, whole) for module in (*own, decoder)]
    mixtures = [module.experts for module in own if isinstance(module, Mixture)]
    if mixtures and lane.expert_replicas.size > 1:
        mesh = DeviceMesh.from_group(lane.expert_replicas.group, device)
        parts = [(experts, mesh) for experts in mixtures] + parts
    alone = set(decoder.experts()) if lane.expert_replicas.size == 1 else set()  # nobody else has them
    for module, mesh in parts:
        fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3, ignored_params=alone)
    for module in sharded(decoder):  # losses are sums already divided by all tokens: gradients add up
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)


def sharded(decoder: Decoder) -> Iterator[FSDPModule]:
    """The parts that are gathered and scattered as one."""
    return (module for module in decoder.modules() if isinstance(module, FSDPModule))


def last_micro_batch(decoder: Decoder, zero: int, *, last: bool) -> None:
    """Tell the parts whether gradients are to be summed over the replicas after the next backward pass."""
    for module in sharded(decoder):
        module.set_requires_gradient_sync(last or zero > 1, recurse=False)


def local(tensor: Tensor) -> Tensor:
    """The own shard, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
