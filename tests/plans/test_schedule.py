"""Custom schedules: a table that cannot run is refused, with the action that is wrong."""

from __future__ import annotations

import pytest

from meshwright.plans import Schedule
from meshwright.plans.schedule import table_faults


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
