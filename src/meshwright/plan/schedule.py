"""Pipeline schedules: which device group runs which stage, and how many micro-batches are in flight."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from meshwright.tables import Table

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev", "custom"]
V_SHAPED = ("zbv", "dualpipev")  # two stages per group: down the groups, then back up


class Schedule(Table, frozen=True, kw_only=True):
    """The order in which a pipeline works. `virtual` is the number of stages each device group holds."""

    name: ScheduleName = "1f1b"
    virtual: Annotated[int, Meta(ge=1, le=1024)] = 1
    table: Annotated[
        tuple[tuple[str, ...], ...],
        Meta(
            description="custom only: per device group the actions in order, such as 0F0 or 1B3 (stage, kind, micro-batch)"
        ),
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
    2 (p - r - 1) + (v - 1) p forwards and hold one more (Narayanan et al., 2021). Zero-bubble delays weight
    gradients, so every group holds p per stage (Qi et al., 2023). The V-shaped ones hold 2 p stage inputs,
    DualPipeV one more while a forward and a backward overlap.

    >>> in_flight(Schedule(name="1f1b"), groups=4, micro_batches=16, group=0)
    (4,)
    """
    m, p, r, v = micro_batches, groups, group, schedule.virtual
    if schedule.name in {"gpipe", "custom"} or (p == 1 and v == 1):
        each = m if schedule.name in {"gpipe", "custom"} else 1
        return (each,) * v
    if schedule.name in V_SHAPED:
        down = 2 * p - r - (1 if schedule.name == "zbv" else 0)
        return min(m, down), min(m, 1 + r)
    if schedule.name == "zero-bubble":
        return (min(m, p),) * v
    if v == 1:
        return (min(m, p - r),)
    total = min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1)
    round_size = min(p, m)
    held = [0] * v
    for forward in range(total):  # forwards go through the stages in rounds of p micro-batches
        held[forward // round_size % v] += 1
    return tuple(min(h, m) for h in held)
