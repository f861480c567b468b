"""Sum gradients of `fully_shard` modules at the owners of their shards; `fsdp.py` connects modules to it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from meshwright.compression.sync.bucket import Gradients
from meshwright.compression.sync.layout import Choice
from meshwright.compression.sync.options import Options
from meshwright.compression.sync.reduce_scatter import Owned
from meshwright.compression.sync.synchroniser import Synchroniser
from meshwright.compression.sync.transport.agreement import alike, described
from meshwright.compression.sync.transport.wire import Traffic

scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13


class ShardSynchroniser(Synchroniser):
    """Synchroniser of sharded modules: sums at the owners of shards, or between `copies` of equal shards."""

    def __init__(self, choice: Any, options: Options, group: Any, traffic: Traffic | None, *, copies: bool) -> None:
        super().__init__(choice, options, group=group, traffic=traffic, owned=not copies)
        self.copies, self.choices = copies, dict[str, Choice]()  # by the name of a parameter
        self._under_way: list[tuple[Future[Tensor], Tensor, float]] = []
        self._pass = -1  # the backward pass at whose end they are waited for
        self._order: dict[int, int] = {}  # module whose gradients came first, second ... in this step

    @property
    def size(self) -> int:
        return self._wires.all.size

    def agree(self) -> None:
        """Refuse choices that are not the same on all ranks."""
        wire = self._wires.all
        mine = "; ".join(f"{name}: {described(choice)}" for name, choice in self.choices.items())
        said: list[Any] = [None] * wire.size
        dist.all_gather_object(said, mine, group=wire.group)
        alike(said, dist.get_process_group_ranks(wire.group), "choice")

    def prepare(self, gradients: Gradients) -> None:
        """Benchmark strategies before the first gradients, if they are to be decided."""
        if self.pilot:
            self.pilot.prepare(self._whole(gradients).shapes)

    def scatter(self, whole: Tensor, into: Tensor, gradients: Gradients, bucket: int) -> Future[Tensor]:
        """Start a reduce-scatter; each rank gets its own part."""
        return self._begin((whole, into), gradients, bucket, False, into)

    def later(self, future: Future[Tensor], into: Tensor, factor: float) -> None:
        """Make `finish` wait for a future, and then scale its result."""
        self._under_way.append((future, into, factor))

    def finish_with_backward(self) -> bool:
        """Finish at the end of the running backward pass; return False if none runs."""
        current = int(torch._C._current_graph_task_id())
        if current >= 0 and self._pass != current:
            self._pass = current
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        return current >= 0

    def finish(self) -> None:
        """Finish the step."""
        self.wait_for_all()
        self._order.clear()
        if self.pilot:
            self._end_step(0)
        else:
            self.step += 1

    def wait_for_all(self) -> None:
        """Wait for all sums in progress."""
        under_way, self._under_way = self._under_way, []
        for future, into, factor in under_way:
            self.wait(future)
            if factor != 1:
                into.mul_(factor)

    def _made(self, gradients: Gradients, bucket: int, device: torch.device) -> Any:
        choices = self._chosen(gradients, bucket)
        if self.copies:
            return self._bucket(gradients, choices, device)
        counts = gradients.counts[: len(choices)]
        residual = (
            self._residuals.flat(gradients.keys, gradients.counts, device) if self.options.error_feedback else None
        )
        return Owned(counts, choices, self._wires.all, residual=residual, device=device)

    def _chosen(self, gradients: Gradients, bucket: int) -> list[Choice]:
        """Return the choice of every gradient; all owners' shards of one share it."""
        whole = self._whole(gradients)
        if warming := self._warming():
            return [warming] * len(whole.keys)
        if self.pilot is None:
            return [self.choices[str(key)] for key in whole.keys]
        place = self._order.setdefault(bucket, len(self._order))
        found: list[Choice] = self._asked(self.pilot.choices, bucket, place, whole)
        return found

    def _whole(self, gradients: Gradients) -> Gradients:
        """Return gradients by name, with those of all owners together."""
        if self.copies:
            return gradients
        each = len(gradients.keys) // self.size
        names = [str(key).rpartition("/")[0] for key in gradients.keys[:each]]
        return Gradients(tuple(names), tuple((self.size * count,) for count in gradients.counts[:each]))

    def _handed(self, gradients: Gradients, bucket: int, last: bool) -> None:
        self._order.setdefault(bucket, len(self._order))
        super()._handed(self._whole(gradients), bucket, last)

    def _by_backend(self, given: Any, gradients: Gradients, bucket: int, last: bool) -> Future[Tensor]:
        """Run the backend's own reduce-scatter if nothing pays: without threads and messages of ours, with our limit."""
        if self.copies:
            return super()._by_backend(given, gradients, bucket, last)
        whole, into = given
        try:
            scatter_tensor(into, whole, op=dist.ReduceOp.SUM, group=self._wires.all.group)
        except RuntimeError as error:
            raise self._failed("a reduce-scatter failed", self.step, bucket) from error
        self.traffic.spend((self.size - 1) * whole.nbytes // self.size)
        self._handed(gradients, bucket, last)
        done: Future[Tensor] = Future()
        done.set_result(into)
        return done
