"""The executor runs the plan's own table, moves what neighbours need, and can stop between two actions."""

from __future__ import annotations

import time
from collections import defaultdict
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.plans.action_table import ActionTable, action_table
from meshwright.plans.schedule import Action, Schedule, ScheduleName
from meshwright.run.mesh.mesh import local
from meshwright.run.parallel.apply import apply
from meshwright.run.parallel.executor import Transfer, made, needed, table_of, with_transfers
from tests.run.families import CONFIGS
from tests.run.parity import GROUPS, batches, plan_of, world_of
from tests.run.pool import pool

SCHEDULES: list[tuple[ScheduleName, int]] = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1), ("zero-bubble", 2),
    ("zbv", 2), ("dualpipev", 2),
]  # fmt: skip


def tables(name: ScheduleName, virtual: int) -> list[tuple[ActionTable, int]]:
    """Tables of one to five groups and one to nine micro-batches that a plan may ask for, and their stages."""
    found = []
    for groups in range(1, 6):
        for micro_batches in range(1, 10):
            if name == "dualpipev" and micro_batches < 2 * groups:  # a rule of plans
                continue
            if (
                name in {"interleaved", "zero-bubble"}
                and virtual > 1
                and micro_batches % max(1, micro_batches // groups)
            ):
                continue
            table = action_table(Schedule(name=name, virtual=virtual), groups, micro_batches)
            found.append((table, groups * virtual))
            found.append((tuple(tuple(one for one in row if one[1] == "F") for row in table), groups * virtual))
    return found


@pytest.mark.parametrize(("name", "virtual"), SCHEDULES)
def test_rows_compute_what_the_table_says(name: ScheduleName, virtual: int) -> None:
    for table, stages in tables(name, virtual):
        for row, actions in zip(with_transfers(table, stages), table, strict=True):
            assert tuple(entry.action for entry in row) == (None, *actions)


@pytest.mark.parametrize(("name", "virtual"), SCHEDULES)
def test_both_ends_of_a_link_agree_on_the_order(name: ScheduleName, virtual: int) -> None:
    for table, stages in tables(name, virtual):
        rows = [[one for entry in row for one in entry.transfers] for row in with_transfers(table, stages)]
        group = {action[0]: row for row, actions in enumerate(table) for action in actions}
        every = [one for actions in table for action in actions if (one := made(action, stages))]
        seen: dict[Transfer, list[int]] = defaultdict(list)
        for row, transfers in enumerate(rows):
            for one in transfers:
                seen[one].append(row)
        across = [one for one in every if group[one.source] != group[one.target]]
        assert {one: sorted((group[one.source], group[one.target])) for one in across} == seen
        for a, b in combinations(range(len(rows)), 2):
            assert [one for one in rows[a] if b in seen[one]] == [one for one in rows[b] if a in seen[one]]


@pytest.mark.parametrize(("name", "virtual"), SCHEDULES)
def test_groups_that_do_one_thing_at_a_time_come_to_the_end(name: ScheduleName, virtual: int) -> None:
    """A transfer needs both ends at once, and what is sent must have been made: the strictest way to run a table."""
    for table, stages in tables(name, virtual):
        assert _left(table, stages) == 0


def _left(table: ActionTable, stages: int) -> int:
    """Return how many actions and transfers of the rows never come about."""
    rows: list[list[Action | Transfer]] = [
        [step for entry in row for step in (entry.action, *entry.transfers) if step]
        for row in with_transfers(table, stages)
    ]
    done, moved = set[Transfer](), True
    while moved:
        moved = False
        for row in rows:
            step = row[0] if row else None
            if isinstance(step, Transfer):
                ends = [other for other in rows if other and other[0] == step]
                if len(ends) == 2 and step in done:
                    moved = [end.pop(0) for end in ends] != []
            elif step and needed(step, stages) in {None, *done}:
                moved, found = bool(row.pop(0)), made(step, stages)
                done |= {found} if found else set()
    return sum(map(len, rows))


def test_a_table_that_waits_for_ever_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stops before \(0, 'B', 0\)"):
        with_transfers((((0, "B", 0), (0, "F", 0)), ((1, "F", 0), (1, "B", 0))), stages=2)


def _record(stage: Any, ran: list[Action]) -> None:
    """Note what a stage computes."""
    forward, backward, weights = stage.forward, stage.backward, stage.backward_weights

    def noted_forward(m: int, *args: Any, **options: Any) -> Any:
        ran.append((stage.index, "F", m))
        return forward(m, *args, **options)

    def noted_backward(m: int, grad: Any, *, whole: bool) -> Any:
        ran.append((stage.index, "B" if whole else "I", m))
        return backward(m, grad, whole=whole)

    def noted_weights(m: int) -> None:
        ran.append((stage.index, "W", m))
        weights(m)

    stage.forward, stage.backward, stage.backward_weights = noted_forward, noted_backward, noted_weights


def stopped(table: str, name: str) -> tuple[list[float], bool, list[Action], tuple[Action, ...]]:
    """Return the losses of a whole step and of one that stops at every micro-batch, whether gradients are equal, what
    the second ran, and the row of the table."""
    model, plan = plan_of(table, CONFIGS[name])
    part = apply(model, plan, seed=7, groups=GROUPS)
    tokens, documents = batches("packed")[0]
    own = part.micro_batches(tokens, documents)
    whole = part.step(own, tokens.numel())
    expected = [None if one.grad is None else local(one.grad).clone() for one in part.parameters()]
    for weight in part.parameters():
        weight.grad = None
    executor, ran = part.executor, list[Action]()
    for stage in executor.stages:
        _record(stage, ran)
    executor.begin(own, tokens.numel())
    border = 0
    while executor.upcoming:
        if executor.upcoming[2] != border:
            border = executor.upcoming[2]
            time.sleep(0.01 * (1 + len(executor.stages)))  # whoever stops makes others wait, no more
        executor.advance()
    loss = executor.finish()
    part.sum_gradients()
    again = part.outcome(loss)
    same = all(
        (one.grad is None) == (wanted is None) and (wanted is None or torch.equal(local(one.grad), wanted))
        for one, wanted in zip(part.parameters(), expected, strict=True)
    )
    rows = table_of(plan.pipelines[0])
    mine = {stage.index for stage in executor.stages}
    (row,) = [row for row in rows if {action[0] for action in row} == mine]
    return [whole.loss, again.loss], same, ran, row


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ("micro_batches=4", "llama"),
        ("pp=2,micro_batches=4", "llama"),
        ("pp=2,dp=2,zero=2,micro_batches=4", "llama-deep"),
        ("pp=2,schedule=zbv,virtual=2,micro_batches=4", "llama-deep"),
        ("pp=2,schedule=zero-bubble,micro_batches=4", "gpt2-deep"),
    ],
)
def test_a_step_stops_between_micro_batches_and_goes_on(table: str, name: str) -> None:
    for losses, same, ran, row in pool(world_of(plan_of(table, CONFIGS[name])[1])).run(stopped, table, name):
        assert losses[0] == losses[1]
        assert same
        assert tuple(ran) == row


def apart(steps: int) -> list[float]:
    """Return losses of a whole step and of one whose second process begins late, after `steps` actions of the first."""
    model, plan = plan_of("pp=2,micro_batches=4", CONFIGS["llama"])
    part: Any = apply(model, plan, seed=7, groups=GROUPS)
    tokens, _ = batches("whole")[0]
    own = part.micro_batches(tokens)
    whole = part.step(own, tokens.numel())
    if dist.get_rank() == 0:
        part.executor.begin(own, tokens.numel())
        for _ in range(steps):
            part.executor.advance()
    dist.barrier()
    if dist.get_rank() == 1:
        part.executor.begin(own, tokens.numel())
    while part.executor.upcoming:
        part.executor.advance()
    again = part.outcome(part.executor.finish())
    return [whole.loss, again.loss]


def test_what_was_sent_before_a_stop_arrives_after_it() -> None:
    for losses in pool(2).run(apart, 2):  # both forwards that the first stage runs ahead
        assert losses[0] == losses[1]
