"""The event simulation: closed forms where they hold, brute force where they do not."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise

import pytest

from meshwright.cost import simulate
from meshwright.errors import InputError
from meshwright.plans import Schedule, action_table
from meshwright.plans.schedule import Action

UNIT = {"F": 1, "B": 2, "I": 1, "W": 1}


def seconds(name: str, p: int, m: int, v: int = 1, f: int = 1, b: int = 2) -> float:
    table = action_table(Schedule(name=name, virtual=v), p, m)  # type: ignore[arg-type]
    return simulate(table, lambda action: f if action[1] == "F" else b).seconds


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equal_stages_take_m_plus_p_minus_1(name: str) -> None:
    for p in range(1, 9):
        for m in range(p, 20):
            for f, b in ((1, 1), (1, 2), (3, 5)):
                assert seconds(name, p, m, f=f, b=b) == (m + p - 1) * (f + b)


def test_interleaving_divides_the_bubble() -> None:
    """Narayanan et al. 2021: bubble fraction (p - 1) / (v m), when rounds are full."""
    for p in range(2, 7):
        for v in (2, 3, 4):
            for m in (p, 2 * p, 3 * p):
                total = seconds("interleaved", p, m, v)
                assert total == (m * v + p - 1) * 3
                ideal = m * v * 3
                assert Fraction(int(total - ideal), ideal) == Fraction(p - 1, v * m)


def test_zero_bubble_v_has_the_bubble_of_its_paper() -> None:
    """Qi et al. 2023: with equal F, I and W and enough micro-batches, no group waits once it has begun."""
    for p in (2, 4, 6):
        m = 3 * p
        timeline = simulate(action_table(Schedule(name="zbv", virtual=2), p, m), lambda action: 1.0)
        for group in range(p):
            mine = [event for event in timeline.events if event.group == group]
            assert mine[-1].end - mine[0].start == timeline.busy(group) == 6 * m


def test_zero_bubble_beats_1f1b() -> None:
    for p in (2, 4, 8):
        table = action_table(Schedule(name="zero-bubble", virtual=1), p, 2 * p)
        assert simulate(table, lambda action: UNIT[action[1]]).seconds < seconds("1f1b", p, 2 * p)


def longest_path(table: tuple[tuple[Action, ...], ...], times: dict[Action, float], hop: float) -> float:
    """Brute force: the longest chain of actions, by relaxing every dependency until nothing moves."""
    home = {action[0]: group for group, row in enumerate(table) for action in row}
    last = max(home)
    needs: dict[Action, list[tuple[Action, float]]] = {}
    for row in table:
        for before, action in zip((None, *row), row, strict=False):
            stage, kind, m = action
            sources = [(before, 0.0)] if before else []
            if kind == "F" and stage:
                sources.append(((stage - 1, "F", m), hop * (home[stage - 1] != home[stage])))
            if kind in "BI":
                sources.append(((stage, "F", m), 0.0))
                if stage < last:
                    later = next((stage + 1, k, m) for k in "BI" if (stage + 1, k, m) in times)
                    sources.append((later, hop * (home[stage + 1] != home[stage])))
            if kind == "W":
                sources.append(((stage, "I", m), 0.0))
            needs[action] = sources
    ends = dict.fromkeys(times, 0.0)
    for _ in range(len(times) + 1):
        for action, sources in needs.items():
            ends[action] = max([ends[s] + wait for s, wait in sources], default=0.0) + times[action]
    return max(ends.values())


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"])
def test_uneven_stages_micro_batches_and_transfers_by_brute_force(name: str) -> None:
    draw = random.Random(7)
    virtual = 2 if name in {"interleaved", "zbv", "dualpipev"} else 1
    for _ in range(10):
        p = draw.choice([2, 3, 4])
        m = 2 * p * draw.choice([1, 2])
        table = action_table(Schedule(name=name, virtual=virtual), p, m)  # type: ignore[arg-type]
        times = {action: draw.uniform(0.5, 3.0) for row in table for action in row}
        hop = draw.choice([0.0, 0.3, 2.0])
        found = simulate(table, times.__getitem__, lambda a, b, hop=hop: hop)
        assert found.seconds == pytest.approx(longest_path(table, times, hop), rel=1e-12)


def test_events_of_a_group_never_overlap_and_keep_their_order() -> None:
    table = action_table(Schedule(name="interleaved", virtual=2), 4, 8)
    timeline = simulate(table, lambda action: 1.0 + action[0] / 10)
    for group, row in enumerate(table):
        mine = [event for event in timeline.events if event.group == group]
        assert [(e.stage, e.kind, e.micro_batch) for e in mine] == list(row)
        assert all(before.end <= after.start for before, after in pairwise(mine))


def test_a_table_that_waits_for_ever_is_named() -> None:
    with pytest.raises(InputError, match="never gets past 0B0"):
        simulate((((0, "B", 0), (0, "F", 0)),), lambda action: 1.0)
