"""Connect a `DistributedDataParallel` module to a synchroniser: `register(ddp, Choice(codec("int8"), "scatter"))`.

With `Auto`, no hook is registered while nothing pays: DDP all-reduces as always, and only the times at which gradients
become ready are recorded. An idle hook also costs some percent of a short step, and DDP cannot remove it. If
compression pays later, since a link has become slower, the hook is registered then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.compression.sync.bucket import Gradients, as_it_lies
from meshwright.compression.sync.options import Options
from meshwright.compression.sync.synchroniser import Synchroniser, hook
from meshwright.compression.sync.transport.wire import Traffic
from meshwright.errors import InputError

_USUAL = 25 << 20  # bytes of a bucket of DDP


def register(
    ddp: Any, choice: Any, *, group: Any = None, traffic: Traffic | None = None, **options: Any
) -> Synchroniser:
    """Average the gradients of a `DistributedDataParallel` module this way; options are those of `Options`.

    >>> import torch
    >>> import torch.distributed as dist
    >>> from meshwright.compression import codec
    >>> from meshwright.compression.sync import Choice
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2, bias=False))
    >>> state = register(ddp, Choice(codec("fp16"), "scatter"), warm_up=((100, Choice()),), limit=20.0)
    >>> ddp(torch.ones(1, 4)).sum().backward()
    >>> ddp.module.weight.grad.sum().item(), state.step
    (8.0, 1)
    >>> state.close()
    >>> dist.destroy_process_group()
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise InputError(f"is a {type(ddp).__name__}", field="ddp", valid="a DistributedDataParallel module")
    if getattr(ddp, "_comm_hooks", None):
        raise InputError("has a communication hook already", field="ddp", valid="a module without one")
    if any(isinstance(getattr(one, "__self__", None), _Aside) for one in ddp._forward_pre_hooks.values()):
        raise InputError(
            "has a synchroniser that looks on", field="ddp", valid="a module whose synchroniser was closed"
        )
    names = {id(one): name for name, one in ddp.module.named_parameters()}
    told = {"group": group or ddp.process_group, "traffic": traffic, "names": names}
    state = Synchroniser(choice, Options.of(options), **told)
    if state.pilot is None:
        ddp.register_comm_hook(state, hook)
        return state
    parameters = [one for one in ddp.parameters() if one.requires_grad]
    state.pilot.prepare([as_it_lies(one) for one in parameters])
    buckets = _cut(parameters, getattr(ddp, "bucket_bytes_cap", _USUAL))
    gradients = [state.gradients(one) for one in buckets]
    if _hook_needed(ddp, choice, state.options, parameters) or not state.stands_aside(gradients):
        ddp.register_comm_hook(state, hook)
    else:
        _Aside(ddp, state, [one[-1] for one in buckets], gradients)
    return state


def _hook_needed(ddp: Any, choice: Any, options: Options, parameters: Sequence[nn.Parameter]) -> bool:
    """Return True if DDP alone would do something else, or could not be observed.

    - Sums, momentum and warm-up are the synchroniser's, which also refuses CUDA devices and examines gradients for a
      guard.
    - Ranks that use different parameters, or not all, would be out of step without DDP's order of buckets.
    """
    asked = options.momentum or options.warm_up or not options.mean or choice.guard is not None
    some = ddp.find_unused_parameters or getattr(ddp, "static_graph", False)
    return bool(asked or some or any(one.is_cuda for one in parameters))


class _Aside:
    """Synchroniser that only observes until compression pays."""

    def __init__(
        self, ddp: Any, state: Synchroniser, ends: Sequence[nn.Parameter], gradients: Sequence[Gradients]
    ) -> None:
        self._ddp, self._state, self._gradients = ddp, state, gradients
        self._ready: set[int] = set()
        self._pays = False
        self._hooks = [ddp.register_forward_pre_hook(self._before)]
        for place, one in enumerate(ends):
            self._hooks.append(one.register_post_accumulate_grad_hook(lambda _, at=place: self._gradient(at)))
        state.at_close(self._leave)

    def _gradient(self, place: int) -> None:
        """Record that the last gradient of a bucket is ready."""
        if not self._ddp.require_backward_grad_sync:
            return
        self._ready.add(place)
        last = len(self._ready) == len(self._gradients)
        self._pays |= self._state.watch(self._gradients[place], place, last=last)
        if last:
            self._ready.clear()

    def _before(self, module: nn.Module, given: Any) -> None:
        """Register the hook between two steps.

        If ranks may run out of data at different times (`ddp.join()`), DDP calls the hook for those that have, which
        nothing else would reveal.
        """
        if self._pays or getattr(getattr(self._ddp, "_join_config", None), "enable", False):
            self._ddp.register_comm_hook(self._state, hook)
            self._leave()

    def _leave(self) -> None:
        for one in self._hooks:
            one.remove()


def _cut(parameters: Sequence[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """Cut buckets as DDP does: from the last parameter on, which has the first gradient."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for one in reversed(parameters):
        if room <= 0:
            buckets.append([])
            room = most
        buckets[-1].append(one)
        room -= one.nbytes
    return buckets
