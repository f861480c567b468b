"""Generators, coroutines and context managers under a watch: a pause is no end, and going on is no new call."""

from __future__ import annotations

import asyncio

import pytest

from tests.watcher import subjects
from tests.watcher.seen import Look, short
from tests.watcher.subjects import Counter

HERE = "tests.watcher.subjects"


@pytest.mark.parametrize("more", [{}, {"attributes": True}, {"wrapper": "plain"}])
def test_generators_run_once(look: Look, more: dict[str, object]) -> None:
    """Fault 5: yields are no new calls."""
    events = look(lambda: list(subjects.numbers()), f"{HERE}:numbers", **more)
    assert [one.event for one in events] == ["run", "yield", "resume", "yield", "resume", "end"]


def test_generators_interleave(look: Look) -> None:
    def work() -> None:
        first, second = subjects.numbers(), subjects.numbers()
        next(first), next(second), next(first)
        list(second)

    events = look(work, subjects.numbers)
    assert {one.depth for one in events} == {0}
    calls = ["run", "yield", "run", "yield", "resume", "yield", "resume", "yield", "resume", "end"]
    assert [one.event for one in events[: len(calls)]] == calls


@pytest.mark.parametrize("more", [{}, {"wrapper": "plain"}])
def test_generators_are_closed(look: Look, more: dict[str, object]) -> None:
    """Inside a `try`: elsewhere Python 3.13 does not run a generator again to close it."""

    def work() -> None:
        generator = subjects.echo()
        next(generator)
        generator.close()

    events = look(work, subjects.echo, **more)
    assert [one.event for one in events] == ["run", "yield", "resume", "end"]
    assert events[-1].text == "closed"


def test_generators_that_are_thrown_into_go_on(look: Look) -> None:
    heard = []

    def work() -> None:
        generator = subjects.echo()
        next(generator)
        heard.append(generator.send("hello"))
        heard.append(generator.throw(KeyError("x")))
        heard.append(generator.send("again"))
        with pytest.raises(ValueError, match="y"):
            generator.throw(ValueError("y"))

    events = look(work, f"{HERE}:echo", locals=True)
    assert heard == ["heard hello", "heard error 'x'", "heard again"]
    calls = [one.event for one in events if one.event not in ("set", "del")]
    assert calls == ["run", *["yield", "resume"] * 4, "raise"]


def test_generator_methods_see_their_object(look: Look) -> None:
    found = short(look(lambda: list(Counter(1).each(1)), f"{HERE}:Counter.each", attributes=True))
    assert found[-2:] == ["  set Counter.count 1 -> 55", "end Counter.each"]


def test_context_managers_pass_exceptions(look: Look) -> None:
    def work() -> None:
        with pytest.raises(ZeroDivisionError), subjects.guarded():
            _ = 1 / 0

    found = short(look(work, [f"{HERE}:guarded", f"{HERE}:factorial"]))
    assert found[-1] == "raise guarded ZeroDivisionError: division by zero"
    assert len([line for line in found if "run guarded" in line]) == 1


def test_coroutines(look: Look) -> None:
    answer = []
    events = look(
        lambda: answer.append(asyncio.run(subjects.gather())), [subjects.gather, subjects.wait], wrapper="plain"
    )
    assert answer == [[1, 2]]
    waits = [one.event for one in events if one.name == "wait"]
    assert waits.count("run") == waits.count("end") == 2
    assert waits.count("yield") == waits.count("resume") == 2
    assert sorted(one.text for one in events if one.name == "wait" and one.event == "end") == ["-> 1", "-> 2"]
