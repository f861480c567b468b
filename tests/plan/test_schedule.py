"""Micro-batches in flight equal what PyTorch's own schedules hold."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from meshwright.plan import Schedule, group_of_stage, in_flight
from meshwright.plan.schedule import table_faults

TORCH = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
SIZES = [(p, v, m) for p in range(1, 7) for v in (1, 2, 3) for m in range(1, 17)]
CASES = [
    *(("gpipe", p, 1, m) for p, v, m in SIZES if v == 1),
    *(("1f1b", p, 1, m) for p, v, m in SIZES if v == 1 and m >= p),
    # PyTorch deals micro-batches in equal rounds and refuses the rest, as our rule does.
    *((name, p, v, m) for name in ("interleaved", "zero-bubble") for p, v, m in SIZES
      if v > 1 and p > 1 and m % max(1, m // p) == 0),
    *(("zbv", p, 2, m) for p, v, m in SIZES if v == 2 and p > 1),
    *(("dualpipev", p, 2, m) for p, v, m in SIZES if v == 2 and p > 1 and m >= 2 * p),
]  # fmt: skip


def held_at_peak(actions: list[object]) -> dict[int, int]:
    """Walk one rank's table: a forward holds activations, a (weight) backward lets them go."""
    held: dict[int, int] = {}
    peak: dict[int, int] = {}

    def walk(action) -> None:  # type: ignore[no-untyped-def]
        nonlocal peak
        for part in getattr(action, "sub_actions", None) or ():
            walk(part)
        kind = action.computation_type.name if action else ""
        if kind == "FORWARD":
            held[action.stage_index] = held.get(action.stage_index, 0) + 1
        elif kind in {"FULL_BACKWARD", "BACKWARD_WEIGHT"}:
            held[action.stage_index] -= 1
        if sum(held.values()) > sum(peak.values()):
            peak = dict(held)

    for action in actions:
        if action is not None:
            walk(action)
    return peak


@pytest.mark.parametrize("name", list(TORCH))
def test_in_flight_equals_pytorch(name: str) -> None:
    """Every size up to 6 groups, 3 stages each and 16 micro-batches."""
    cases = [case for case in CASES if case[0] == name]
    assert len(cases) > 20
    for case in cases:
        compare(*case)


def compare(name: str, groups: int, virtual: int, micro_batches: int) -> None:
    schedule = Schedule(name=name, virtual=virtual)  # type: ignore[arg-type]
    tables = get_schedule_ops(TORCH[name], groups, micro_batches, virtual)
    for group in range(groups):
        peak = held_at_peak(tables[group])
        mine = [s for s in range(groups * virtual) if group_of_stage(schedule, groups * virtual, s) == group]
        assert set(peak) <= set(mine), "the stages of a group are PyTorch's"
        expected = tuple(peak.get(s, 0) for s in mine)
        assert in_flight(schedule, groups, micro_batches, group) == expected, (
            name,
            groups,
            virtual,
            micro_batches,
            group,
        )
        # The same table as a custom schedule runs to its end and holds the same. PyTorch's printer numbers the
        # micro-batches of 1F1B wrongly, and a custom table has no V shape and no overlapped pairs.
        if name in {"gpipe", "interleaved", "zero-bubble"}:
            rows = tuple(tuple(str(a) for a in row if a is not None and "REDUCE" not in str(a)) for row in tables)
            custom = Schedule(name="custom", virtual=virtual, table=rows)
            assert list(table_faults(custom, groups * virtual, micro_batches)) == []
            assert in_flight(custom, groups, micro_batches, group) == expected


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ([["0F0", "0B0"]], "rows for 2"),
        ([["0F0", "0B0"], ["banana", "1F0", "1B0"]], "banana"),
        ([["0F0", "0B0", "0B0"], ["1F0", "1B0"]], "twice"),
        ([["0F0", "1B0"], ["1F0"]], "belongs to group 1"),
        ([["0F0"], ["1F0", "1B0"]], "needs one F and one B"),
        ([["0F0", "0I0"], ["1F0", "1B0"]], "needs one F and one B"),
        ([["0F0", "0B0", "0F7"], ["1F0", "1B0"]], "beyond"),
        ([["0B0", "0F0"], ["1F0", "1B0"]], "waits for an action"),
        ([["0F0", "0B0"], ["1B0", "1F0"]], "waits for an action"),
    ],
)
def test_custom_tables_that_cannot_run(table: list[list[str]], problem: str) -> None:
    schedule = Schedule(name="custom", table=tuple(map(tuple, table)))
    assert any(problem in fault for _, fault in table_faults(schedule, 2, 1))
