"""What `--diff` says of two ranks whose events are written down here."""

from __future__ import annotations

from meshwright.watcher.events.compare import compare, lines_of
from meshwright.watcher.events.events import Event


def told(rank: int, *words: str) -> list[Event]:
    """'set Tr.h 3' after 'run Tr.step'."""
    parts = [(*word.split(), None)[:3] for word in words]
    return [
        Event(str(event), 10 * i + rank, rank, "MainThread", 0, str(name), new=new)
        for i, (event, name, new) in enumerate(parts)
    ]


def test_the_context_is_what_both_did_in_order() -> None:
    """Rank 1 sets `h` only after a call of its own: before the parting it has not."""
    step = ["run Tr.step", "set Tr.loss 1", "set Tr.h 0", "end Tr.step", "run Tr.step", "set Tr.loss 2"]
    left = told(0, *step, "set Tr.h 1", "end Tr.step")
    right = told(1, *step, "run Tr.extra", "end Tr.extra", "set Tr.h 1", "end Tr.step")
    for pair in ((0, 1), (1, 0)):
        found = compare([*left, *right], *pair)
        assert found.flow is not None
        said = [f"{one.event} {one.name}" for one in found.flow.before]
        assert said == ["set Tr.h", "end Tr.step", "run Tr.step", "set Tr.loss"]
        assert found.values == ()
        assert not any("nothing" in line for line in lines_of(found))


def test_a_value_that_one_rank_alone_has_is_said_where_calls_are_the_same() -> None:
    left = told(0, "run f", "set A.x 1", "set A.y 1", "end f")
    right = told(1, "run f", "set A.x 1", "end f")
    found = compare([*left, *right], 0, 1)
    assert found.flow is None
    assert [(one and one.name, other) for one, other in found.values] == [("A.y", None)]


def test_values_that_differ_before_the_parting_are_said() -> None:
    left = told(0, "run f", "set A.x 1", "run g")
    right = told(1, "run f", "set A.x 2", "set A.y 1", "run h")
    found = compare([*left, *right], 0, 1)
    assert [(one and one.new, other and other.new) for one, other in found.values] == [("1", "2")]
    assert found.flow is not None
    assert [one.name for one in found.flow.before] == ["f", "A.x"]
