"""Run the action table of a plan on one process: forwards, backwards and transfers, one after the other.

The table says in which order every device group computes. `with_transfers` adds to each row what it sends and receives,
in one order that all groups share: it walks all rows together, and whenever an action hands something to another group,
the send goes to the end of one row and the receive to the end of the other. So both ends of a link issue the same
transfers in the same order, which NCCL needs, and no group waits for something that comes after what it does first.

A pipeline of one stage is the same loop without transfers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from meshwright.plans.action_table import ActionTable, action_table
from meshwright.plans.document import Pipeline
from meshwright.plans.schedule import Action, group_of_stage
from meshwright.run.parallel.fsdp import no_gradient
from meshwright.run.parallel.redistribute import Bridge
from meshwright.run.parallel.stage import MicroBatch, Stage


class Transfer(NamedTuple):
    """Activation or gradient of one micro-batch, from a stage to its neighbour."""

    kind: str  # F: an activation, to the next stage; B: its gradient, back
    source: int  # stage
    target: int
    micro_batch: int


class Entry(NamedTuple):
    """One action of a device group, and the transfers that the group starts right after it."""

    action: Action | None  # None: before the first action
    needed: Transfer | None  # what it takes from a neighbour
    made: Transfer | None  # what it has for a neighbour
    transfers: tuple[Transfer, ...]


def needed(action: Action, stages: int) -> Transfer | None:
    """Return what an action takes from a neighbour.

    >>> needed((1, "F", 0), stages=2)
    Transfer(kind='F', source=0, target=1, micro_batch=0)
    """
    stage, kind, micro_batch = action
    if kind == "F":
        return Transfer("F", stage - 1, stage, micro_batch) if stage else None
    return Transfer("B", stage + 1, stage, micro_batch) if kind != "W" and stage < stages - 1 else None


def made(action: Action, stages: int) -> Transfer | None:
    """Return what an action has for a neighbour."""
    stage, kind, micro_batch = action
    if kind == "F":
        return Transfer("F", stage, stage + 1, micro_batch) if stage < stages - 1 else None
    return Transfer("B", stage, stage - 1, micro_batch) if kind != "W" and stage else None


def with_transfers(table: ActionTable, stages: int) -> list[list[Entry]]:
    """Return the rows of a table with sends and receives, in an order in which no group can block another for ever.

    >>> [entry.action for entry in with_transfers((((0, "F", 0),), ((1, "F", 0),)), stages=2)[1]]
    [None, (1, 'F', 0)]
    """
    group = {stage: row for row, actions in enumerate(table) for stage, _, _ in actions}
    rows: list[list[tuple[Action | None, Transfer | None, Transfer | None, list[Transfer]]]]
    rows = [[(None, None, None, [])] for _ in table]
    left, done, moved = [deque(actions) for actions in table], set[Transfer | None]([None]), True
    while moved:
        moved = False
        for row, actions in enumerate(left):
            if not actions or (taken := needed(actions[0], stages)) not in done:
                continue
            action, moved = actions.popleft(), True
            found = made(action, stages)
            rows[row].append((action, taken, found, []))
            done.add(found)
            if found and group[found.target] != row:
                for one in (row, group[found.target]):
                    rows[one][-1][3].append(found)
    if any(left):  # the plan's rules refuse such tables
        raise ValueError(f"the table stops before {next(actions[0] for actions in left if actions)}")
    return [[Entry(action, taken, found, tuple(some)) for action, taken, found, some in row] for row in rows]


def table_of(pipeline: Pipeline) -> ActionTable:
    """Return the actions of every device group of a pipeline."""
    return action_table(pipeline.schedule, len(pipeline.stages) // pipeline.schedule.virtual, pipeline.micro_batches)


def halved(pipeline: Pipeline) -> bool:
    """Return whether some backward passes come in two halves: input gradients first, weight gradients later."""
    return any(kind == "W" for row in table_of(pipeline) for _, kind, _ in row)


class Executor:
    """Runs the micro-batches of a step through the stages of this process.

    `step` runs a whole one. Whoever wants to stop between two actions takes its three parts instead: `begin`, then
    `advance` until it returns False, then `finish`. In between `upcoming` names the next action. What has been sent by
    then arrives, and nothing is lost by waiting: the step goes on with the next `advance`. Processes of one device group
    must stop at the same action, since they work on it together.
    """

    def __init__(
        self, pipeline: Pipeline, stages: Sequence[Stage], bridges: Mapping[int, tuple[Bridge, Bridge]], like: Tensor, *,
        ahead: bool = True,
    ) -> None:  # fmt: skip
        """Prepare the row of this process.

        `bridges` lead from a stage to the next and back. `like` is an empty activation: it has the type, device and width
        of all. `ahead`: receives do not wait for what they receive.
        """
        self.stages, self.like, self.ahead = list(stages), like, ahead
        self.halved = halved(pipeline)
        self._row: Sequence[Entry] = ()
        self._at = 1  # in the row; what stands before the first action is started at the begin
        self._count, self._bridges = len(pipeline.stages), bridges
        self._own = {stage.index: stage for stage in stages}
        table = table_of(pipeline)
        forwards = tuple(tuple(action for action in row if action[1] == "F") for row in table)
        row = group_of_stage(pipeline.schedule, self._count, stages[0].index)
        self._training, self._evaluation = (with_transfers(each, self._count)[row] for each in (table, forwards))
        self._handed: dict[Transfer, Tensor] = {}  # between neighbours of this process, or until it is sent
        self._arriving: dict[Transfer, tuple[list[Tensor], list[Any]]] = {}  # tensors, and what to wait for
        self._sending: dict[Transfer, tuple[list[Tensor], list[Any]]] = {}

    def step(self, batches: Sequence[MicroBatch], divisor: float, *, backward: bool = True) -> Tensor:
        """Return the sum of the losses that this process computed, over `divisor`; parameters get gradients."""
        self.begin(batches, divisor, backward=backward)
        while self.advance():
            pass
        return self.finish()

    def begin(self, batches: Sequence[MicroBatch], divisor: float, *, backward: bool = True) -> None:
        """Begin a step: start what arrives before the first action.

        What was left of a step that did not come to its end is forgotten. Its transfers must not be under way any more.
        """
        for kept in (self._handed, self._arriving, self._sending):
            kept.clear()
        self._batches, self._divisor, self._backward = batches, divisor, backward
        self._row, self._at = self._training if backward else self._evaluation, 1
        self._left = Counter(one.action[0] for one in self._row if one.action)
        self._loss = torch.zeros((), device=self.like.device)
        for stage in self.stages:
            stage.begin()
        if self.halved and backward:
            self._widen_gradients()
        if self._row[0].transfers:
            self._start(self._row[0].transfers)

    @property
    def upcoming(self) -> Action | None:
        """The action that `advance` runs next; None where the step has no more."""
        return self._row[self._at].action if self._at < len(self._row) else None

    def advance(self) -> bool:
        """Run the next action, and start the transfers that follow it; return whether there is another action."""
        entry = self._row[self._at]
        action = entry.action
        assert action
        with record_function("PP:{}{}{}".format(*action)):
            self._compute(action, entry.needed, entry.made)
        if entry.transfers:
            self._start(entry.transfers)
        self._left[action[0]] -= 1
        if not self._left[action[0]]:
            self._own[action[0]].finish()
        self._at += 1
        return self._at < len(self._row)

    def finish(self) -> Tensor:
        """Wait until all has been sent; return the sum of the losses that this process computed, over the divisor."""
        assert self._at == len(self._row), f"the step stands before {self.upcoming}"
        for transfer in list(self._sending):
            self._sent(transfer)
        return self._loss

    def _widen_gradients(self) -> None:
        """Backward passes in halves would leave the first gradient in the type of its weight."""
        for weight in (weight for stage in self.stages for weight in stage.parameters()):
            if weight.requires_grad and weight.grad is None and weight.grad_dtype != weight.dtype:
                weight.grad = no_gradient(weight)

    def _compute(self, action: Action, taken: Transfer | None, result: Transfer | None) -> None:
        index, kind, m = action
        stage = self._own[index]
        if kind == "W":
            stage.backward_weights(m)
            return
        given = self._arrived(taken) if taken else None
        if kind == "F":
            found: Tensor | None = stage.forward(m, given, self._batches[m], self._divisor, backward=self._backward)
        else:
            found = stage.backward(m, given, whole=kind == "B")
            if taken:  # the gradient of what was sent is here: it has arrived
                self._sent(Transfer("F", index, index + 1, m))
        if result:
            assert found is not None
            self._handed[result] = self._bridge(result).moved(found) if result.target in self._own else found
        elif kind == "F":
            self._loss += found

    # Transfers

    def _bridge(self, transfer: Transfer) -> Bridge:
        there, back = self._bridges[min(transfer.source, transfer.target)]
        return there if transfer.kind == "F" else back

    def _start(self, transfers: Sequence[Transfer]) -> None:
        """Start transfers all at once; only receives that may not run ahead are waited for."""
        operations, owners = [], []
        for transfer in transfers:
            bridge, sends = self._bridge(transfer), transfer.source in self._own
            parts = bridge.sends(self._handed.pop(transfer)) if sends else bridge.buffers(self.like)
            under_way = self._sending if sends else self._arriving
            under_way[transfer] = [part for _, part in parts], []
            operations += [dist.P2POp(dist.isend if sends else dist.irecv, part, peer) for peer, part in parts]
            owners += [under_way[transfer][1]] * len(parts)
        works = dist.batch_isend_irecv(operations) if operations else []
        each = len(works) == len(operations)  # NCCL has one work for all
        for i, owner in enumerate(owners):
            owner.extend([works[i]] if each else works)
        for transfer in () if self.ahead else transfers:
            if transfer in self._arriving:
                _wait(self._arriving[transfer][1])

    def _arrived(self, transfer: Transfer) -> Tensor:
        """Return an activation or gradient of a neighbour, once it is here."""
        if transfer in self._handed:
            return self._handed.pop(transfer)
        parts, works = self._arriving.pop(transfer)
        _wait(works)
        return self._bridge(transfer).joined(None, parts, self.like)

    def _sent(self, transfer: Transfer) -> None:
        """Let go of something that was sent, if it was: until then its memory must stay."""
        _wait(self._sending.pop(transfer, ([], []))[1])


def _wait(works: list[Any]) -> None:
    """Wait for each once."""
    while works:
        works.pop(0).wait()
