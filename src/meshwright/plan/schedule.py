"""Pipeline schedules: which device group runs which stage, and how many micro-batches are in flight."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta

from meshwright.tables import Table

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev", "custom"]
V_SHAPED = ("zbv", "dualpipev")  # two stages per group: down the groups, then back up
Action = tuple[int, str, int]  # stage, kind (F forward, B backward, I input gradient, W weight gradient), micro-batch


class Schedule(Table, frozen=True, kw_only=True):
    """The order in which a pipeline works. `virtual` is the number of stages each device group holds."""

    name: ScheduleName = "1f1b"
    virtual: Annotated[int, Meta(ge=1, le=1024)] = 1
    table: Annotated[
        tuple[tuple[str, ...], ...],
        Meta(description="custom only: per device group its actions in order, 0F3 = stage 0, forward, micro-batch 3"),
    ] = ()


def group_of_stage(schedule: Schedule, stages: int, stage: int) -> int:
    """The device group that runs a stage: around in a loop, or in a V.

    >>> [group_of_stage(Schedule(name="zbv", virtual=2), 4, s) for s in range(4)]
    [0, 1, 1, 0]
    """
    groups = stages // schedule.virtual
    if schedule.name in V_SHAPED:
        return stage if stage < groups else 2 * groups - 1 - stage
    return stage % groups


def in_flight(schedule: Schedule, groups: int, micro_batches: int, group: int) -> tuple[int, ...]:
    """Micro-batches whose activations a group holds at its peak, per stage it runs.

    GPipe holds all. 1F1B holds one per group from here to the end. The interleaved schedules warm up with
    2 (p - r - 1) + (v - 1) q forwards, q micro-batches a round, and hold one more (Narayanan et al., 2021).
    Zero-bubble delays weight gradients and holds (v - 1) q + p (Qi et al., 2023). The V-shaped ones hold
    2 p stage inputs, DualPipeV one more while a forward and a backward overlap.

    >>> in_flight(Schedule(name="1f1b"), groups=4, micro_batches=16, group=0)
    (4,)
    """
    m, p, r, v = micro_batches, groups, group, schedule.virtual
    if schedule.name == "custom":
        return _held_at_peak(schedule, groups * v, group)
    if schedule.name == "gpipe":
        return (m,) * v
    if schedule.name in V_SHAPED:
        down = 2 * p - r - (1 if schedule.name == "zbv" else 0)
        return min(m, down), min(m, 1 + r)
    if v == 1:
        return (min(m, p if schedule.name == "zero-bubble" else p - r),)
    per_round = m // max(1, m // p)
    ahead = p if schedule.name == "zero-bubble" else 2 * (p - r - 1) + 1
    held = [0] * v
    for forward in range(min(m * v, (v - 1) * per_round + ahead)):
        held[forward // per_round % v] += 1
    return tuple(held)


def parse_action(text: str) -> Action | None:
    """
    >>> parse_action("2F13")
    (2, 'F', 13)
    """
    match = re.fullmatch(r"(\d{1,5})([FBIW])(\d{1,7})", text, re.ASCII)
    return (int(match[1]), match[2], int(match[3])) if match else None


def _held_at_peak(schedule: Schedule, stages: int, group: int) -> tuple[int, ...]:
    """Walk a custom table: a forward holds activations, a whole or weight backward lets them go."""
    mine = [s for s in range(stages) if group_of_stage(schedule, stages, s) == group]
    held, peak = dict.fromkeys(mine, 0), dict.fromkeys(mine, 0)
    for stage, kind, _ in (action for text in schedule.table[group] if (action := parse_action(text))):
        held[stage] += {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
        if sum(held.values()) > sum(peak.values()):
            peak = dict(held)
    return tuple(peak[stage] for stage in mine)


def table_faults(schedule: Schedule, stages: int, micro_batches: int) -> Iterator[tuple[int, str]]:
    """What is wrong with a custom table: (row, problem), nothing if it can run to its end."""
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
    """Run the rows against one another; the first that waits for ever, if any."""
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
