"""Schedules as tables equal PyTorch's own, action by action."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from meshwright.plan import Schedule, action_table, group_of_stage, in_flight
from meshwright.plan.schedule import Action, table_faults

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
def test_every_table_runs_and_holds_what_the_closed_form_says(name: str) -> None:
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
            assert held_at_peak(table[r], mine) == in_flight(schedule, p, m, r), (p, v, m, r)


def held_at_peak(row: tuple[Action, ...], stages: list[int]) -> tuple[int, ...]:
    held = dict.fromkeys(stages, 0)
    peak = dict(held)
    for stage, kind, _ in row:
        held[stage] += {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
        if sum(held.values()) > sum(peak.values()):
            peak = dict(held)
    return tuple(peak[stage] for stage in stages)
