"""Pipeline schedules by name, the device group of each stage, and the check of a custom table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from meshwright.base.tables import Table

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev", "custom"]
V_SHAPED: tuple[ScheduleName, ...] = ("zbv", "dualpipev")  # two stages per group: down the groups, then back up
Action = tuple[int, str, int]  # stage, kind (F forward, B backward, I input gradient, W weight gradient), micro-batch


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
    if stuck := _stuck(rows, stages):
        yield stuck


def _stuck(rows: list[list[Action]], stages: int) -> tuple[int, str] | None:
    """Run the rows against one another and return the first that waits for ever, if any."""
    done: set[Action] = set()
    position = [0] * len(rows)

    def ready(action: Action) -> bool:
        stage, kind, m = action
        if kind == "F":
            return stage == 0 or (stage - 1, "F", m) in done
        if kind == "W":
            return (stage, "I", m) in done
        after = stage == stages - 1 or bool({(stage + 1, "B", m), (stage + 1, "I", m)} & done)
        return (stage, "F", m) in done and after

    moved = True
    while moved:
        moved = False
        for row, actions in enumerate(rows):
            while position[row] < len(actions) and ready(actions[position[row]]):
                done.add(actions[position[row]])
                position[row] += 1
                moved = True
    for row, actions in enumerate(rows):
        if position[row] < len(actions):
            stage, kind, m = actions[position[row]]
            return row, f"{stage}{kind}{m} waits for an action that never comes before it"
    return None
