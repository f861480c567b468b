"""Schedules as tables equal PyTorch's own, action by action."""

from __future__ import annotations

import random
from typing import Any

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from meshwright.plans import Schedule, action_table, group_of_stage, in_flight
from meshwright.plans.schedule import Action, table_faults

TORCH = {
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def sizes(name: str) -> list[tuple[int, int, int]]:
    """(groups, stages per group, micro-batches) that PyTorch accepts, up to 6, 3 and 16."""
    everything = [(p, v, m) for p in range(1, 7) for v in (1, 2, 3) for m in range(1, 17)]
    legal = {
        "gpipe": lambda p, v, m: v == 1,
        "1f1b": lambda p, v, m: v == 1,
        "interleaved": lambda p, v, m: v > 1 and p > 1 and m % max(1, m // p) == 0,
        "zero-bubble": lambda p, v, m: v > 1 and p > 1 and m % max(1, m // p) == 0,
        "zbv": lambda p, v, m: v == 2 and p > 1,
        "dualpipev": lambda p, v, m: v == 2 and p > 1 and m >= 2 * p,
    }[name]
    return [size for size in everything if legal(*size)]


def flattened(row: list[Any]) -> tuple[Action, ...]:
    """PyTorch's row without idle slots and reductions; an overlapped pair as its two actions."""
    parts = [part for action in row if action is not None for part in getattr(action, "sub_actions", None) or (action,)]
    compute = [part for part in parts if part.computation_type.name in KINDS]
    return tuple((part.stage_index, KINDS[part.computation_type.name], part.microbatch_index) for part in compute)


@pytest.mark.parametrize("name", list(TORCH))
def test_tables_equal_pytorch(name: str) -> None:
    for p, v, m in sizes(name):
        expected = tuple(flattened(row) for row in get_schedule_ops(TORCH[name], p, m, v))
        assert action_table(Schedule(name=name, virtual=v), p, m) == expected, (p, v, m)  # type: ignore[arg-type]


def test_1f1b_equals_its_definition() -> None:
    """PyTorch prints wrong micro-batch numbers for this one; the kinds in order are right, and so is the definition."""
    for p, _, m in sizes("1f1b"):
        for r, row in enumerate(action_table(Schedule(name="1f1b"), p, m)):
            ahead = min(m, p - 1 - r)
            kinds = "F" * ahead + "FB" * (m - ahead) + "B" * ahead
            assert "".join(kind for _, kind, _ in row) == kinds
            for wanted in "FB":
                assert [n for _, kind, n in row if kind == wanted] == list(range(m))
        if m >= p:
            for mine, theirs in zip(
                action_table(Schedule(name="1f1b"), p, m), get_schedule_ops("1F1B", p, m, 1), strict=True
            ):
                assert [a[1] for a in mine] == [a[1] for a in flattened(theirs)]


@pytest.mark.parametrize("name", [*TORCH, "1f1b"])
def test_what_is_in_flight_is_what_the_table_holds(name: str) -> None:
    """Whatever the stages weigh: the largest sum over the listed mixes is the largest sum over the whole table."""
    draw = random.Random(3)
    for p, v, m in sizes(name):
        schedule = Schedule(name=name, virtual=v)  # type: ignore[arg-type]
        table = action_table(schedule, p, m)
        texts = tuple(tuple("".join(map(str, action)) for action in row) for row in table)
        written = Schedule(name="custom", virtual=v, table=texts)
        assert action_table(written, p, m) == table
        if name not in {"zbv", "dualpipev"}:  # a custom table goes around, not in a V
            assert list(table_faults(written, p * v, m)) == []
        for r in range(p):
            mine = [s for s in range(p * v) if group_of_stage(schedule, p * v, s) == r]
            for weights in ([1] * v, [draw.randint(1, 9) for _ in range(v)], [9, *[1] * (v - 1)]):
                listed = max(
                    sum(w * n for w, n in zip(weights, mix, strict=True)) for mix in in_flight(schedule, p, m, r)
                )
                assert listed == heaviest(table[r], dict(zip(mine, weights, strict=True))), (p, v, m, r, weights)


def heaviest(row: tuple[Action, ...], weights: dict[int, int]) -> int:
    held = most = 0
    for stage, kind, _ in row:
        held += weights[stage] * {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
        most = max(most, held)
    return most


@pytest.mark.parametrize(("name", "virtual"), [("interleaved", 2), ("interleaved", 3), ("zero-bubble", 2), ("zbv", 2)])
def test_many_rounds_hold_no_more_than_a_few(name: str, virtual: int) -> None:
    schedule = Schedule(name=name, virtual=virtual)  # type: ignore[arg-type]
    for p in (2, 3, 4):
        row = action_table(schedule, p, 40 * p)
        for r in range(p):
            mine = [s for s in range(p * virtual) if group_of_stage(schedule, p * virtual, s) == r]
            weights = dict(zip(mine, (5, 2, 1), strict=False))
            listed = max(
                sum(w * n for w, n in zip(weights.values(), mix, strict=True))
                for mix in in_flight(schedule, p, 40 * p, r)
            )
            assert listed == heaviest(row[r], weights)
