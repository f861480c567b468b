"""The steps of a call, in C and in Python: held against each other, and against copies that a trace function makes."""

from __future__ import annotations

import copy
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import meshwright
from meshwright.watcher.events.events import Event
from tests.watcher import subjects, variables
from tests.watcher.seen import Look, needs_c, without_compiler

OPTIONS: list[dict[str, Any]] = [
    {"attributes": True},
    {"locals": True},
    {"attributes": True, "locals": True},
    {"attributes": True, "wrapper": "plain"},
    {"attributes": True, "locals": True, "wrapper": "plain"},
    {"attributes": True, "locals": True, "globals": True},
    {"attributes": ["a", "count"], "locals": ["n*", "x", "got"]},
    {"locals": True, "wrapper": "memory"},
]


def without_times(events: list[Event]) -> list[tuple[Any, ...]]:
    """All else that an event says; but no numbers of bytes, which the wrapper `memory` finds."""
    rows = []
    for one in events:
        text = "bytes" if "iB" in one.text else one.text
        rows.append((one.event, one.thread, one.depth, one.name, one.at, one.old, one.new, text, one.duration is None))
    return rows


def all_of_it() -> None:
    variables.all_of_it()
    variables.tensors(torch)
    counter = subjects.Counter(1)
    counter.saved(), counter.outer(), list(counter.each(2)), counter.keep(1), counter.replace(2), counter.remove()
    slotted = subjects.Slotted()
    slotted.grow(), slotted.shrink()
    echo = subjects.echo()
    next(echo), echo.send("hello"), echo.throw(KeyError("x")), echo.close()
    subjects.takes(subjects.Loud()), subjects.takes([1]), subjects.takes(torch.ones(2))


@needs_c
@pytest.mark.parametrize("more", OPTIONS, ids=str)
def test_c_says_what_python_says(look: Look, more: dict[str, Any]) -> None:
    targets = ["tests.watcher.variables", "tests.watcher.subjects"]
    in_c = look(all_of_it, targets, **more)
    with without_compiler():
        in_python = look(all_of_it, targets, **more)
    assert without_times(in_c) == without_times(in_python)
    assert len(in_c) > 100


def copied(value: Any) -> Any:
    """What can be told of a value later, when it may have changed."""
    if torch.is_tensor(value):
        memory = None if value.is_sparse else value.data_ptr()
        return id(value), tuple(value.shape), memory, value.to_dense().tolist()
    if isinstance(value, bytearray | set | deque):
        return id(value), copy.copy(value)
    if isinstance(value, list | dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return id(value), [(key, id(one), torch.is_tensor(one) and copied(one)) for key, one in items]
    return (type(value), repr(value)) if isinstance(value, int | float | str) else id(value)


def traced(function: Callable[..., object], *args: object) -> list[tuple[int, str]]:
    """(line, variable) of every change, by copies of all variables after every line."""
    found: list[tuple[int, str]] = []
    kept: list[object] = []  # so that no identity comes again

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not function.__code__:  # type: ignore[attr-defined]
            return None
        names, state = frame.f_code.co_varnames, {}
        line = frame.f_lineno

        def local(frame: FrameType, event: str, _: object) -> Any:
            nonlocal line, state
            now = {name: copied(frame.f_locals[name]) for name in names if name in frame.f_locals}
            kept.extend(frame.f_locals.values())
            found.extend((line, name) for name in names if name in now and now[name] != state.get(name))
            found.extend((line, name) for name in names if name in state and name not in now)
            state, line = now, frame.f_lineno
            return local

        state = {name: copied(frame.f_locals[name]) for name in names if name in frame.f_locals}
        return local

    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(None)
    return found


@pytest.mark.parametrize(
    ("function", "args"), [(variables.values, ()), (variables.things, ()), (variables.tensors, (torch,))]
)
def test_every_change_of_a_variable_is_said(
    look: Look, either: None, function: Callable[..., object], args: tuple[object, ...]
) -> None:
    expected = traced(function, *args)
    events = look(lambda: function(*args), function, locals=True)
    said = [(int(one.at.rpartition(":")[2]), one.name) for one in events if one.event in ("set", "del")]
    assert said == expected
    assert len(said) > 10


def test_variables_that_are_shared_with_inner_functions(look: Look, either: None) -> None:
    events = look(lambda: variables.shared(3), "tests.watcher.variables:shared", locals=["total", "x", "last"])
    said = {1: list[str](), 2: list[str]()}
    for one in events:
        if one.event in ("set", "del"):
            said[one.depth].append(f"{one.event} {one.name} {one.old} -> {one.new}")
    assert said[2] == [
        "set total 0 -> 1", "set x 3 -> 1", "set total 1 -> 2", "set x 1 -> 2", "set total 2 -> 3", "set x 5 -> 3",
    ]  # fmt: skip
    assert said[1] == [
        "set total None -> 0", "set x 3 -> 1", "set total 0 -> 1", "set x 1 -> 2", "set last None -> 2",
        "set total 1 -> 2", "del x 2 -> None", "set x None -> 5", "set x 5 -> 3", "set total 2 -> 3",
    ]  # fmt: skip


def test_attributes_that_are_stored(look: Look, either: None) -> None:
    """A value that is another object, but the same, is no change."""
    derived = variables.Derived()
    events = look(lambda: derived.store(500), variables.Derived, attributes=True)
    said = [(one.name, one.old, one.new) for one in events if one.event == "set"]
    short = "'" + ("text" * 500)[:92] + "..."
    assert said == [
        ("Derived.a", "1", "1000"), ("Derived.a", "1000", "1000.0"), ("Derived.b", "[1, 1]", "1000.0"),
        ("Derived.b", "1000.0", "[1000.0]"), ("Derived.b", "[1000.0]", short), ("Derived.b", short, f"1{'0' * 92}..."),
    ]  # fmt: skip


def test_variables_live_no_longer_than_they_would(look: Look, either: None) -> None:
    answers = []
    look(lambda: answers.append(variables.released()), "tests.watcher.variables", locals=True, attributes=True)
    assert answers == [True]


def test_what_cannot_be_looked_at_hides_nothing_else(look: Look, either: None) -> None:
    events = look(lambda: variables.Awkward().work(), variables.Awkward, locals=["n", "found"])
    assert [one.new for one in events if one.name == "n"] == ["1", "2", "3"]
    assert "not seen: RuntimeError: too long" in {one.text for one in events if one.event == "note"}


def test_words_are_of_the_moment_of_the_call(look: Look, either: None) -> None:
    """Though they become text when they are written."""

    def work() -> None:
        tensor = torch.zeros(2, 3)
        subjects.takes(tensor)
        tensor.add_(1)
        tensor.data = torch.zeros(7, dtype=torch.float16)

    events = look(work, subjects.takes, wrapper="plain")
    assert [one.text for one in events] == ["thing=Tensor[2, 3] float32 cpu v0", "-> Tensor[2, 3] float32 cpu v0"]


def test_words_on_the_terminal(either: None, capfd: pytest.CaptureFixture[str]) -> None:
    with meshwright.watch([variables.tensors, subjects.takes], locals=["x", "y"], wrapper="plain"):
        subjects.takes(torch.zeros(2, 3))
        variables.tensors(torch)
    written = capfd.readouterr().err.splitlines()
    assert "run takes  thing=Tensor[2, 3] float32 cpu v0" in written[0]
    assert any("set y  Tensor[2] float32 cpu v0 -> Tensor[2] float32 cpu v1" in line for line in written)


def test_arguments_of_every_form(look: Look, either: None) -> None:
    derived = variables.Derived()
    events = look(lambda: derived.ways(0, 5, k=3, z=4), f"{variables.__name__}:Derived.ways", wrapper="plain")
    assert events[0].text == "n=0, k=3, args=(5,), more={'z': 4}"
    assert events[-1].text == "-> 'bad 3'"


def test_threads_that_come_and_go(look: Look, either: None) -> None:
    """Also one that takes the place of another that is gone, and one that runs in between."""

    def work() -> None:
        for i in range(20):
            thread = threading.Thread(target=subjects.Counter(i).outer, name=f"thread {i}")
            thread.start()
            thread.join()
            subjects.Counter(i).outer()

    events = look(work, f"{subjects.__name__}:Counter.outer", attributes=True, locals=True)
    ends = [(one.thread, one.depth) for one in events if one.event == "end"]
    assert ends == [(name, 0) for i in range(20) for name in (f"thread {i}", "MainThread")]
