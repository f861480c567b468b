"""What programs do that is rare: destructors, other threads, too many calls, generators in each other, odd tensors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.watcher import subjects
from tests.watcher.seen import Look


class Handle:
    """Who lets go of it hears so at once, in the midst of storing another."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner

    def __del__(self) -> None:
        self.owner.released()


class Owner:
    def __init__(self) -> None:
        self.more: dict[str, list[int]] = {}
        for i in range(40):  # so many that its attributes lie in a dict
            setattr(self, f"part{i}", [i])
        self.handles: list[Handle] = []
        self.count = 0

    def step(self) -> None:
        self.handles = [Handle(self)]

    def released(self) -> None:
        self.count += 1

    def close(self) -> None:
        self.handles = []


def test_a_destructor_that_looks_at_what_is_being_stored(look: Look, either: None) -> None:
    """What an attribute held is gone by then: nobody may touch it."""
    owner = Owner()

    def work() -> None:
        for _ in range(200):
            owner.step()
        owner.close()

    events = look(work, Owner, attributes=True)
    assert [one.new for one in events if one.name == "Owner.count" and one.event == "set"] == [*map(str, range(1, 201))]


def test_a_dict_that_another_thread_fills_and_empties(look: Look, either: None) -> None:
    owner, over, before = Owner(), threading.Event(), sys.getswitchinterval()

    def fill() -> None:
        while not over.is_set():
            owner.more.update((str(i), [i]) for i in range(40))
            for i in range(40):
                owner.more.pop(str(i), None)

    def work() -> None:
        other = threading.Thread(target=fill)
        other.start()
        for _ in range(3000):
            owner.released()
        over.set(), other.join()

    sys.setswitchinterval(1e-5)
    try:
        events = look(work, Owner, attributes=True)
    finally:
        sys.setswitchinterval(before)
    assert sum(one.name == "Owner.count" and one.event == "set" for one in events) == 3000
    assert not [one.text for one in events if one.event == "note"]


class Undescribed:
    """Its tensors do not say their shapes."""

    def __init__(self) -> None:
        self.nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        self.unsized = torch.nn.UninitializedParameter()
        self.x = 1

    def go(self, given: torch.Tensor) -> int:
        self.x += 1
        nested = self.nested
        nested.mul_(2)
        count = 1
        return -count


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_do_not_say_their_shape(look: Look, either: None) -> None:
    """They are shown by their kind, and all else is followed."""
    subject = Undescribed()
    events = look(lambda: subject.go(subject.nested), Undescribed, attributes=True, locals=True, wrapper="plain")
    said = [f"{one.name} {one.old} -> {one.new}" for one in events if one.event == "set"]
    shown = "<Tensor not described: RuntimeError>"
    assert said == [
        "Undescribed.x 1 -> 2", f"nested None -> {shown} v0", f"Undescribed.nested {shown} v0 -> {shown} v1",
        f"given {shown} v0 -> {shown} v1", f"nested {shown} v0 -> {shown} v1", "count None -> 1",
    ]  # fmt: skip
    assert [one.text for one in events if one.event != "set"] == [f"given={shown} v0", "-> -1"]


class Pretends:
    """What it says it is costs something."""

    asked = 0

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        Pretends.asked += 1
        return int


def test_values_are_not_asked_what_they_are(look: Look, either: None) -> None:
    look(lambda: subjects.takes(Pretends()), subjects.takes, locals=True, wrapper="plain")
    look(lambda: subjects.takes([Pretends()]), subjects.takes, locals=True, wrapper="plain")
    assert Pretends.asked == 0


def endless() -> None:
    endless()


def caught(depth: int) -> int:
    try:
        return caught(depth + 1)
    except RecursionError:
        return depth


@pytest.mark.parametrize("more", [{}, {"locals": True}], ids=str)
def test_too_many_calls_leave_nothing_behind(look: Look, either: None, more: dict[str, Any]) -> None:
    """Our hooks are calls too: the last of them cannot be made."""
    handled: list[object] = []

    def work() -> None:
        with pytest.raises(RecursionError):
            endless()
        handled.append(sys.exc_info()[1])
        assert caught(0) > 100
        handled.append(sys.exc_info()[1])
        try:
            raise KeyError("mine")
        except KeyError as error:
            handled.append(error.__context__)
        subjects.takes(1)

    events = look(work, [endless, caught, subjects.takes], **more)
    assert handled == [None, None, None]
    if sys.version_info < (3, 12):  # later ones do not tell us of all that were left: docs/watch.md says so
        assert [(one.event, one.depth) for one in events[-2:]] == [("run", 0), ("end", 0)]


def nested(depth: int) -> Iterator[int]:
    """Drives generators of its own kind in every way."""
    if not depth:
        try:
            yield 0
        except ValueError:
            yield 1
        return
    inner = nested(depth - 1)
    next(inner)
    inner.throw(ValueError("caught"))
    yield depth
    inner.close()
    other = nested(0)
    next(other)
    try:
        other.throw(KeyError("not caught"))
    except KeyError:
        depth += 1
    yield depth


@pytest.mark.parametrize("more", [{}, {"locals": True}], ids=str)
def test_generators_of_one_function_that_drive_each_other(look: Look, either: None, more: dict[str, Any]) -> None:
    events = look(lambda: [*nested(1)], nested, **more)
    assert [(one.event, one.depth) for one in events if one.event not in ("set", "del")] == [
        ("run", 0), ("run", 1), ("yield", 1), ("resume", 1), ("yield", 1), ("yield", 0), ("resume", 0), ("resume", 1),
        ("end", 1), ("run", 1), ("yield", 1), ("resume", 1), ("raise", 1), ("yield", 0), ("resume", 0), ("end", 0),
    ]  # fmt: skip
    said = [(one.name, one.old, one.new) for one in events if one.event in ("set", "del")]
    assert said == (
        [("inner", None, "<generator>"), ("other", None, "<generator>"), ("depth", "1", "2")] if more else []
    )


class Finally:
    def raises(self) -> None:
        try:
            raise KeyError("x")
        finally:
            self.x = 1

    def pauses(self) -> Iterator[int]:
        try:
            yield 1
        finally:
            self.y = 1


def test_lines_of_a_finally_that_an_exception_leaves(look: Look, either: None) -> None:
    def work() -> None:
        subject = Finally()
        with pytest.raises(KeyError):
            subject.raises()
        made = subject.pauses()
        next(made)
        made.close()  # type: ignore[attr-defined]

    events = look(work, Finally, attributes=True)
    lines = {one.name: int(one.at.rpartition(":")[2]) for one in events if one.event == "set"}
    first = Finally.raises.__code__.co_firstlineno
    assert lines == {"Finally.x": first + 4, "Finally.y": first + 10}


class Swapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.several = [torch.zeros(2)]

    def swap(self) -> None:
        self.weight.data = torch.zeros(3)
        self.several[0].data = torch.zeros(4)


def test_tensors_in_a_dict_or_list_that_get_other_memory(look: Look, either: None) -> None:
    """As a module's parameters, whose versions do not count that."""
    subject = Swapped()
    events = look(lambda: subject.swap(), Swapped, attributes=True)
    assert [(one.name, one.new) for one in events if one.event == "set"] == [
        ("Swapped._parameters", "dict of 1, ['weight'] = Parameter[3] float32 cpu v0"),
        ("Swapped.several", "list of 1, [0] = Tensor[4] float32 cpu v0"),
    ]
