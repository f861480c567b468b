"""Pipeline schedules by name, the device group of each stage, and the check of a custom table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from msgspec import Meta

from meshwright.base.tables import Table

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev", "custom"]
V_SHAPED: tuple[ScheduleName, ...] = ("zbv", "dualpipev")  # two stages per group: down the groups, then back up
Action = tuple[int, str, int]  # stage, kind (F forward, B backward, I input gradient, W weight gradient), micro-batch
Order = list[tuple[int, Action, int]]  # group, its action, and where in the list its input from another group is, or -1


class Schedule(Table, frozen=True, kw_only=True):
    """The order in which a pipeline works. `virtual` is the number of stages each device group holds."""

    name: ScheduleName = "1f1b"
    virtual: Annotated[int, Meta(ge=1, le=1024)] = 1
    table: Annotated[
        tuple[tuple[str, ...], ...],
        Meta(description="custom only: per device group its actions in order, 0F3 = stage 0, forward, micro-batch 3"),
    ] = ()


def virtual_fault(schedule: Schedule) -> tuple[str, str] | None:
    """Return (problem, valid values) if a schedule cannot run so many stages per device group."""
    name, virtual = schedule.name, schedule.virtual
    if name in V_SHAPED and virtual != 2:
        return f"{name} runs two stages per device group, not {virtual}", "2"
    if name in {"gpipe", "1f1b"} and virtual != 1:
        return f"{name} runs one stage per device group, not {virtual}", "1, or interleaved"
    if name == "interleaved" and virtual < 2:
        return "interleaved needs two or more stages per device group", "2 or more, or 1f1b"
    return None


def group_of_stage(schedule: Schedule, stages: int, stage: int) -> int:
    """Return the device group that runs a stage: around in a loop, or in a V.

    >>> [group_of_stage(Schedule(name="zbv", virtual=2), 4, s) for s in range(4)]
    [0, 1, 1, 0]
    """
    groups = stages // schedule.virtual
    if schedule.name in V_SHAPED:
        return stage if stage < groups else 2 * groups - 1 - stage
    return stage % groups


def parse_action(text: str) -> Action | None:
    """Parse an action, or return None.

    >>> parse_action("2F13")
    (2, 'F', 13)
    """
    match = re.fullmatch(r"(\d{1,5})([FBIW])(\d{1,7})", text, re.ASCII)
    return (int(match[1]), match[2], int(match[3])) if match else None


def table_faults(schedule: Schedule, stages: int, micro_batches: int) -> Iterator[tuple[int, str]]:
    """Yield the faults of a custom table as (row, problem); nothing if it can run to its end."""
    groups = stages // schedule.virtual
    if len(schedule.table) != groups:
        yield 0, f"has {len(schedule.table)} rows for {groups} device groups"
        return
    rows: list[list[Action]] = []
    seen: set[Action] = set()
    for row, texts in enumerate(schedule.table):
        actions = []
        for text in texts:
            action = parse_action(text)
            if action is None:
                yield row, f"'{text[:20]}' is not an action such as 0F3"
            elif action in seen:
                yield row, f"{text} appears twice"
            elif action[0] >= stages or action[2] >= micro_batches:
                yield row, f"{text} is beyond {stages} stages and {micro_batches} micro-batches"
            elif group_of_stage(schedule, stages, action[0]) != row:
                yield row, f"{text}: stage {action[0]} belongs to group {group_of_stage(schedule, stages, action[0])}"
            else:
                seen.add(action)
                actions.append(action)
        rows.append(actions)
    for stage in range(stages):
        for m in range(micro_batches):
            whole = (stage, "B", m) in seen
            halves = ((stage, "I", m) in seen) + ((stage, "W", m) in seen)
            if (stage, "F", m) not in seen or (whole, halves) not in {(True, 0), (False, 2)}:
                row = group_of_stage(schedule, stages, stage)
                yield row, f"stage {stage} needs one F and one B (or I and W) of micro-batch {m}"
                return
    if stuck := in_order(rows)[1]:
        yield stuck[0], f"{''.join(map(str, stuck[1]))} waits for an action that never comes before it"


def in_order(rows: Sequence[Sequence[Action]]) -> tuple[Order, tuple[int, Action] | None]:
    """Return all actions of a table, each after those it needs, and the first that waits for ever, with its group.

    The order holds for any times. Every stage belongs to one group, which does its actions one after the other.

    >>> in_order([[(0, "F", 0), (0, "B", 0)], [(1, "F", 0), (1, "B", 0)]])[0]
    [(0, (0, 'F', 0), -1), (1, (1, 'F', 0), 0), (1, (1, 'B', 0), -1), (0, (0, 'B', 0), 2)]
    """
    stages = 1 + max((action[0] for row in rows for action in row), default=0)
    found: Order = []
    forwards: list[dict[int, int]] = [{} for _ in range(stages)]
    backwards: list[dict[int, int]] = [{} for _ in range(stages)]
    position = [0] * len(rows)
    before = -1
    while before < len(found):
        before = len(found)
        for group, row in enumerate(rows):
            at = position[group]
            while at < len(row) and (source := _source(row[at], forwards, backwards)) is not None:
                stage, kind, m = action = row[at]
                if kind != "W":
                    (forwards if kind == "F" else backwards)[stage][m] = len(found)
                found.append((group, action, source if source >= 0 and found[source][0] != group else -1))
                at += 1
            position[group] = at
    rest = ((group, row[at]) for group, (row, at) in enumerate(zip(rows, position, strict=True)) if at < len(row))
    return found, next(rest, None)


def _source(action: Action, forwards: list[dict[int, int]], backwards: list[dict[int, int]]) -> int | None:
    """Return the place of the result that an action waits for, -1 if it is its own stage's, None if it is missing.

    `forwards`, `backwards`: places per stage and micro-batch; of a backward pass in halves, that of the first.
    """
    stage, kind, m = action
    if kind == "F":
        return forwards[stage - 1].get(m) if stage else -1
    if m not in (backwards if kind == "W" else forwards)[stage]:
        return None
    return backwards[stage + 1].get(m) if kind != "W" and stage + 1 < len(backwards) else -1
