"""A stage as PyTorch's pipeline runtime drives it, with bridges to stages of any other size.

PyTorch's own `PipelineStage` speaks with one process before and one after it. Here both sides may have any number of
processes, cut in any way: what each needs is worked out once (`relayout`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.run.parallel.redistribute import Bridge
from meshwright.run.parallel.stage_part import Part
from meshwright.run.torch_private import can_split, stage_backward, stage_backward_input, stage_backward_weight


class Stage:
    """One stage of a pipeline on this process; the names are those that PyTorch's runtime calls."""

    submod = None  # parameters are gathered by their own hooks, not by the runtime

    def __init__(self, part: Part, index: int, of: int, group: int, groups: int, like: Tensor) -> None:
        self.part, self.stage_index, self.num_stages = part, index, of
        self.group_rank, self.group_size = group, groups  # the device group's place in the pipeline
        self.is_first, self.is_last = index == 0, index == of - 1
        self.before: tuple[Bridge, Bridge] | None = None  # from the stage before, and back
        self.after: tuple[Bridge, Bridge] | None = None  # to the next stage, and back
        self.like = like  # an empty activation: type, device and width
        self.has_backward, self.divisor = True, 1.0
        self.splits = can_split()  # else the first half of a backward pass is all of it
        self.ahead = True  # receives do not wait for what they receive
        self.micro_batches, self.split = 1, False  # of a step; whether backward passes come in two halves
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.clear_runtime_states()

    def clear_runtime_states(self) -> None:
        """Forget the last step."""
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._grads_out: dict[int, Tensor] = {}
        self._grads_in: dict[int, Tensor] = {}
        self._halves: dict[int, tuple[Any, Any]] = {}
        self._arriving: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
        self._done = 0

    # What travels

    def get_fwd_recv_ops(self, micro_batch: int) -> list[Any]:
        return self._receive("F", micro_batch, self.before[0]) if self.before else []

    def get_bwd_recv_ops(self, micro_batch: int) -> list[Any]:
        return self._receive("B", micro_batch, self.after[1]) if self.after and self.has_backward else []

    def get_fwd_send_ops(self, micro_batch: int) -> list[Any]:
        if not self.after:
            return []
        output = self._outputs[micro_batch] if self.has_backward else self._outputs.pop(micro_batch)
        return [dist.P2POp(dist.isend, part, peer) for peer, part in self.after[0].sends(output.detach())]

    def get_bwd_send_ops(self, micro_batch: int) -> list[Any]:
        if not self.before or not self.has_backward:
            return []
        grad = self._grads_in.pop(micro_batch)
        return [dist.P2POp(dist.isend, part, peer) for peer, part in self.before[1].sends(grad)]

    def _receive(self, kind: str, micro_batch: int, bridge: Bridge) -> list[Any]:
        buffers = bridge.buffers(self.like)
        self._arriving[kind, micro_batch] = [part for _, part in buffers]
        found = [dist.P2POp(dist.irecv, part, peer) for peer, part in buffers]
        if self.ahead:
            return found
        for one in dist.batch_isend_irecv(found) if found else []:
            one.wait()
        return []

    def _arrived(self, kind: str, micro_batch: int, bridge: Bridge) -> Tensor:
        return bridge.joined(None, self._arriving.pop((kind, micro_batch)), self.like)

    # Two stages of one device group that follow each other (the bottom of a V)

    def set_local_fwd_input(self, output: Tensor, micro_batch: int) -> None:
        assert self.before
        self._inputs[micro_batch] = self.before[0].moved(output.detach())

    def get_local_bwd_output(self, micro_batch: int) -> tuple[Tensor | None]:
        return (self._grads_in.pop(micro_batch) if self.has_backward else None,)

    def set_local_bwd_input(self, grads: tuple[Tensor | None], micro_batch: int) -> None:
        if grads[0] is not None:
            assert self.after
            self._grads_out[micro_batch] = self.after[1].moved(grads[0])

    # What is computed

    def forward_one_chunk(self, micro_batch: int, args: Any, kwargs: Any = None, **_: Any) -> Tensor:
        (batch,) = args
        x = None if self.is_first else self._input(micro_batch)
        with torch.set_grad_enabled(self.has_backward):
            output = self.part(x, batch, self.divisor, halved=self.split)
        if self.has_backward and x is not None:
            self._inputs[micro_batch] = x
        if self.has_backward or not self.is_last:
            self._outputs[micro_batch] = output
        return output

    def _input(self, micro_batch: int) -> Tensor:
        x = self._inputs.pop(micro_batch, None)
        if x is None:
            assert self.before
            x = self._arrived("F", micro_batch, self.before[0])
        return x.requires_grad_(self.has_backward)

    def backward_one_chunk(
        self, micro_batch: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not self.has_backward:
            return
        output, grads = self._outputs.pop(micro_batch), None
        if not self.is_last:
            grad = self._grads_out.pop(micro_batch, None)
            if grad is None:
                assert self.after
                grad = self._arrived("B", micro_batch, self.after[1])
            grads = (grad,)
        inputs: tuple[Tensor, ...] = () if self.is_first else (self._inputs.pop(micro_batch),)
        self._done += 1
        self.part.before(last=self._done == self.micro_batches and not self.split, split=self.split)
        outputs = (loss if self.is_last else output,)
        if full_backward or not (self.splits or self.is_first):
            found = stage_backward(outputs[0] if self.is_last else outputs, grads, inputs)
        elif self.is_first:  # nobody waits for a gradient: all of it is left for the second half
            self._halves[micro_batch] = (outputs, grads)
            return
        else:
            found, groups = stage_backward_input(list(outputs), grads, list(inputs), self.part.parameters())
            self._halves[micro_batch] = (groups, None)
            inputs[0].grad = None
        if inputs:
            self._grads_in[micro_batch] = found[0]

    def backward_weight_one_chunk(self, micro_batch: int, last_backward: bool = False) -> None:
        if not self.has_backward:
            return
        if micro_batch not in self._halves:
            return
        first, second = self._halves.pop(micro_batch)
        if self.is_first:
            stage_backward(first[0] if self.is_last else first, second, ())
        else:
            stage_backward_weight(self.part.parameters(), first)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        self.part.after(split=self.split)
