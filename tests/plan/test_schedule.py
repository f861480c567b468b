"""Micro-batches in flight equal what PyTorch's own schedules hold."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from meshwright.plan import Schedule, group_of_stage, in_flight

TORCH = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
CASES = [
    *(("gpipe", p, 1, m) for p, m in ((1, 3), (2, 4), (4, 8), (4, 2))),
    *(("1f1b", p, 1, m) for p, m in ((1, 3), (2, 4), (4, 8), (8, 8), (8, 32))),
    *(("interleaved", p, v, m) for p, v, m in ((2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 2, 16), (2, 2, 2))),
    *(("zero-bubble", p, v, m) for p, v, m in ((2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 2, 32))),
    *(("zbv", p, 2, m) for p, m in ((2, 2), (2, 8), (4, 8), (8, 16), (8, 32))),
    *(("dualpipev", p, 2, m) for p, m in ((2, 4), (4, 8), (8, 16), (4, 32))),
]


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


@pytest.mark.parametrize(("name", "groups", "virtual", "micro_batches"), CASES)
def test_in_flight_equals_pytorch(name: str, groups: int, virtual: int, micro_batches: int) -> None:
    schedule = Schedule(name=name, virtual=virtual)  # type: ignore[arg-type]
    tables = get_schedule_ops(TORCH[name], groups, micro_batches, virtual)
    for group in range(groups):
        peak = held_at_peak(tables[group])
        mine = [s for s in range(groups * virtual) if group_of_stage(schedule, groups * virtual, s) == group]
        assert set(peak) <= set(mine), "the stages of a group are PyTorch's"
        assert in_flight(schedule, groups, micro_batches, group) == tuple(peak.get(s, 0) for s in mine)
