"""Compressed gradients of `fully_shard` modules: `register_sharded(model, Choice(codec("int8")))`.

PyTorch lets a module have a reduce-scatter of its own (`set_custom_reduce_scatter`). This one only starts where it can:
sums of several modules are in progress during the backward pass, and are complete when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from meshwright.compression.sync.bucket import Gradients
from meshwright.compression.sync.layout import Choice
from meshwright.compression.sync.options import Options
from meshwright.compression.sync.shards import ShardSynchroniser, scatter_tensor
from meshwright.compression.sync.sums import sums_as
from meshwright.compression.sync.transport.wire import Traffic
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.compression.auto.inputs import Auto

ByName = Callable[[str, Tensor], Choice]  # from a parameter's name and itself


class Sharded:
    """Synchronisers of modules that were registered together."""

    def __init__(self, synchronisers: Sequence[ShardSynchroniser]) -> None:
        self.synchronisers = tuple(synchronisers)

    def explain(self) -> str:
        """Return the decisions of `Auto`, one table for each group of ranks that sum together."""
        return "\n\n".join(sync.explain() for sync in self.synchronisers)

    def state(self) -> dict[str, Tensor]:
        """Return the state of the next step, for a checkpoint of this rank. Tensors are views: copy them to keep them."""
        found = enumerate(sync.state().items() for sync in self.synchronisers)
        return {f"{place}/{key}": value for place, items in found for key, value in items}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restore a `state`, before the first step, on as many ranks."""
        for place, sync in enumerate(self.synchronisers):
            mine = f"{place}/"
            sync.restore({key.removeprefix(mine): value for key, value in state.items() if key.startswith(mine)})

    def residuals(self, name: str) -> list[Tensor]:
        """Return this rank's residuals of a parameter: the shards of all owners, one after the other."""
        found = (sync.state().items() for sync in self.synchronisers)
        mine = (f"residual/{name}", f"residual/{name}/")
        return [one for some in found for key, one in some if key == mine[0] or key.startswith(mine[1])]

    def close(self) -> None:
        """End the threads."""
        for sync in self.synchronisers:
            sync.close()


def register_sharded(
    module: nn.Module,
    choice: Choice | ByName | Auto,
    *,
    copies: Any = None,
    traffic: Traffic | None = None,
    **options: Any,
) -> Sharded:
    """Reduce the gradients of `module`, and of all `fully_shard` modules in it, through codecs.

    - `choice` is one for all, a function of each parameter's name and itself, or `Auto`, which uses those of its
      strategies that are possible here. Shards are summed at their owners, so `Choice.topology` has no meaning.
    - `copies`: ranks that hold equal shards of other sets (hybrid sharding, with `fully_shard` over a mesh of one
      dimension). Then sums inside a set are PyTorch's, and those between copies, over `Choice.topology`, are
      compressed. With a mesh of two dimensions PyTorch sums copies.

    >>> from meshwright.compression import codec
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = fully_shard(nn.Linear(4, 2), mesh=dist.init_device_mesh("cpu", (1,)))
    >>> handle = register_sharded(model, Choice(codec("int8")), limit=20.0)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> model.weight.grad.to_local().sum().item()
    8.0
    >>> handle.close()
    >>> dist.destroy_process_group()
    """
    told = Options.of({**options, "mean": False})
    if told.momentum or "mean" in options or (copies is None and told.node != 1):
        wrong = "momentum" if told.momentum else "mean" if "mean" in options else "node"
        raise InputError("is not there for sharded gradients", field=wrong, valid="none")
    names = {id(weight): name for name, weight in module.named_parameters()}
    auto, by_name = (None, choice) if isinstance(choice, Choice) or callable(choice) else (choice, Choice())
    auto = auto and _possible(auto, module, copies)
    made: dict[tuple[int, ...], ShardSynchroniser] = {}
    for number, each in enumerate(one for one in module.modules() if isinstance(one, FSDPModule)):
        for held in _groups(each):
            trained = {_name(names, one): one for one in held.fsdp_params if one.sharded_param.requires_grad}
            chosen = {name: _checked(by_name, name, one.sharded_param, copies) for name, one in trained.items()}
            if not trained or (not auto and all(one.codec is None for one in chosen.values())):
                continue
            group = copies or held.mesh_info.shard_process_group
            ranks = tuple(dist.get_process_group_ranks(group))
            if ranks not in made:
                made[ranks] = ShardSynchroniser(auto or Choice(), told, group, traffic, copies=copies is not None)
            made[ranks].choices.update(chosen)
            each.set_custom_reduce_scatter(_ReduceScatter(made[ranks], held, trained, number, copies))
    if not made:
        raise InputError(
            "nothing in it is sharded and compressed", field="module", valid="what fully_shard was called on"
        )
    for sync in made.values():
        sync.agree()
    return Sharded(list(made.values()))


class _ReduceScatter:
    """Reduce-scatter of one module; PyTorch calls it when the gradients of a backward pass are to be summed."""

    def __init__(self, sync: ShardSynchroniser, held: Any, trained: dict[str, Any], bucket: int, copies: Any) -> None:
        self._sync, self._held, self._trained, self._bucket, self._copies = sync, held, trained, bucket, copies
        # If a dimension cannot be cut evenly, shards are padded.
        counts = [one.padded_sharded_param_size.numel() for one in trained.values()]
        self._count = sum(counts)
        if copies is None:
            keys = [f"{name}/{place}" for place in range(sync.size) for name in trained]
            self._gradients = Gradients(tuple(keys), tuple((count,) for count in counts * sync.size))
        else:
            self._gradients = Gradients(tuple(trained), tuple((count,) for count in counts))
        sync.prepare(self._gradients)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            problem = "the sum is scaled by the backend, which codecs cannot do"
            raise InputError(problem, field="gradient divide factor", valid="set_force_sum_reduction_for_comms(True)")
        if self._copies is not None or output_tensor.numel() != self._count:
            scatter_tensor(output_tensor, input_tensor, op=op, group=group)
        if output_tensor.numel() != self._count:
            # Some parameters had no gradient this time, and PyTorch does not say which: all are summed uncompressed.
            if self._copies is not None:
                dist.all_reduce(output_tensor, op=op, group=self._copies)
            return
        if self._copies is not None:
            future = self._sync.submit(output_tensor, self._gradients, self._bucket, last=False)
        else:
            future = self._sync.scatter(input_tensor, output_tensor, self._gradients, self._bucket)
        self._sync.later(future, output_tensor, 1 / self._sync.size if op == dist.ReduceOp.AVG else 1.0)
        if not self._sync.finish_with_backward():
            self._sync.finish()
        elif not self._lands_as_it_is(output_tensor, op):
            self._sync.wait_for_all()

    def _lands_as_it_is(self, output: Tensor, op: Any) -> bool:
        """Return True if the result becomes the gradient without being read; else PyTorch must wait for it."""
        held, weights = self._held, [one.sharded_param for one in self._trained.values()]
        read = held._all_reduce_hook is not None or held._is_hsdp
        scaled = op != dist.ReduceOp.AVG and held.gradient_divide_factor != 1
        return not (read or scaled) and all(
            weight.grad is None
            and weight.dtype == output.dtype
            and weight.device.type == output.device.type
            and not getattr(weight, "_post_accumulate_grad_hooks", None)
            for weight in weights
        )


def _groups(module: FSDPModule) -> Iterator[Any]:
    """Yield parameters that are reduced together, in PyTorch's own order; not public, seen in torch 2.11 and 2.13."""
    state = fully_shard.state(module)
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return (group for group in groups if group is not None)


def _name(names: Mapping[int, str], held: Any) -> str:
    if id(held.sharded_param) not in names:
        problem = "parameters are gathered, since a forward pass has kept them"
        raise InputError(problem, field="module", valid="one of which every part has been resharded: module.reshard()")
    return names[id(held.sharded_param)]


def _checked(choice: Choice | ByName, name: str, weight: Tensor, copies: Any) -> Choice:
    found = choice if isinstance(choice, Choice) else choice(name, weight)
    if (problem := _impossible(found, copies)) is not None:
        raise problem
    return found


def _impossible(choice: Choice, copies: Any) -> InputError | None:
    """Return why gradients of shards cannot have this choice, or None."""
    if choice.codec is not None and choice.codec.rounds > 1:
        return InputError(f"{choice.codec.name} needs whole matrices", field="codec", valid="a codec of one message")
    if choice.codec is not None and copies is None and sums_as(choice.codec):
        problem = f"messages of {choice.codec.name} are summed by all, and shards by their owners"
        return InputError(problem, field="codec", valid="a codec whose messages are decoded")
    return None


def _possible(auto: Auto, module: nn.Module, copies: Any) -> Auto:
    """Return `Auto` with the strategies that shards can have; at owners, topologies make no difference."""
    if any(one.is_cuda for one in module.parameters()):
        raise InputError("Auto decides for gradients on CPUs", field="choice", valid="a Choice, on CUDA devices")
    if auto.guard is not None:
        raise InputError("is not there for sharded gradients", field="guard", valid="none")
    ways = [way for way in auto.ways if _impossible(way.choice, copies) is None]
    if copies is None:
        alone = (way if way.exact else replace(way, choice=replace(way.choice, topology="scatter")) for way in ways)
        ways = list({(way.choice.codec, way.choice.piece): way for way in alone}.values())
    if not ways:
        raise InputError("no way is possible for shards", field="ways", valid="Way(Choice(codec('int8'), 'scatter'))")
    return replace(auto, ways=tuple(ways))
