"""The watch says what happens: calls, changes, exceptions, generators, threads; and what peers are known to miss."""

from __future__ import annotations

import gc
import json
import signal
import sys
import time
from pathlib import Path

import pytest

import meshwright
from meshwright.watcher.events.events import read
from tests.watcher import subjects
from tests.watcher.seen import Look, short
from tests.watcher.subjects import Child, Counter, Renamed, Sides, Slotted, Table

HERE = "tests.watcher.subjects"


def test_calls_nest_and_take_time(look: Look) -> None:
    events = look(lambda: subjects.factorial(3), f"{HERE}:factorial")
    assert short(events) == [
        "run factorial", "  run factorial", "    run factorial",
        "    end factorial", "  end factorial", "end factorial",
    ]  # fmt: skip
    times = [one.time for one in events]
    assert times == sorted(times)
    outer, inner = events[-1], events[-2]
    assert outer.duration == events[-1].time - events[0].time
    assert inner.duration is not None
    assert 0 < inner.duration < outer.duration
    assert abs(times[0] - time.time_ns()) < 60e9
    source = Path(subjects.__file__).read_text().splitlines()
    assert source[int(events[0].at.rpartition(":")[2]) - 1].startswith("def factorial")


def test_a_change_on_the_last_line_is_inside_its_call(look: Look) -> None:
    """Fault 1: also of `__init__`, whose values must not appear in the next method."""

    def work() -> None:
        counter = Counter(1)
        counter.last()
        counter.nothing()

    assert short(look(work, Counter, attributes=True)) == [
        "run Counter.__init__", "  set Counter.count None -> 1", "  set Counter.items None -> []", "end Counter.__init__",
        "run Counter.last", "  set Counter.count 1 -> 100", "end Counter.last",
        "run Counter.nothing", "end Counter.nothing",
    ]  # fmt: skip


def test_a_change_is_said_once_and_where_it_happened(look: Look) -> None:
    counter = Counter(1)
    events = look(counter.outer, Counter, attributes=["count"])
    assert short(events) == [
        "run Counter.outer", "  run Counter.last", "    set Counter.count 1 -> 100", "  end Counter.last",
        "  set Counter.count 100 -> 7", "end Counter.outer",
    ]  # fmt: skip
    source = Path(subjects.__file__).read_text().splitlines()
    lines = [source[int(one.at.rpartition(":")[2]) - 1].strip() for one in events if one.event == "set"]
    assert lines == ["self.count = 100", "self.count = 7"]


def test_changes_from_outside_are_said_before_the_call(look: Look) -> None:
    def work() -> None:
        counter = Counter(1)
        counter.count = 5
        counter.nothing()

    found = short(look(work, f"{HERE}:Counter.nothing", attributes=True))
    assert found == ["run Counter.nothing", "end Counter.nothing"]  # never seen before: nothing to compare with
    found = short(look(work, Counter, attributes=["count"]))
    assert found[3:] == ["set Counter.count 1 -> 5 before this call", "run Counter.nothing", "end Counter.nothing"]


def test_items_of_lists_and_dicts(look: Look) -> None:
    """Fault 2: changes that leave the length as it is."""

    def work() -> None:
        counter = Counter(0)
        counter.keep(4)
        counter.keep(5)
        counter.replace(6)
        table = Table()
        table.change()
        table.rename()

    found = [line for line in short(look(work, [Counter, Table], attributes=["items", "rows"])) if " set " in line]
    assert found == [
        "  set Counter.items None -> []",
        "  set Counter.items [] -> list of 1, [0] = 4",
        "  set Counter.items [4] -> list of 2, [1] = 5",
        "  set Counter.items [4, 5] -> list of 2, [0] = 6",
        "  set Table.rows None -> {'a': 1, 'b': 2}",
        "  set Table.rows {'a': 1, 'b': 2} -> dict of 2, ['a'] = 10",
        "  set Table.rows {'a': 10, 'b': 2} -> dict of 1, no ['b']",
        "  set Table.rows {'a': 10} -> dict of 2, ['c'] = 3",
    ]


def test_objects_that_methods_call_something_else(look: Look) -> None:
    def work() -> None:
        renamed = Renamed()
        renamed.add(2)
        Renamed.change(renamed)  # a static method runs on no object

    found = short(look(work, Renamed, attributes=True))
    assert found == [
        "run Renamed.__init__", "  set Renamed.n None -> 0", "end Renamed.__init__", "run Renamed.add",
        "  set Renamed.n 0 -> 2", "end Renamed.add", "run Renamed.change", "end Renamed.change",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("by_alias", ["x 0 -> 1 | me.x = 1", "items LONG -> LONG | self.items = list(self.items)"]),
        ("by_alias_in_place", ["items LONG -> LONGER | items += [7]"]),
        ("in_a_condition", ["x 0 -> 1 | if self.bump() > 100:"]),
        ("caught", ["x 0 -> 5 | raise_after(self)", "items LONG -> [] | self.items = []"]),
        ("in_a_loop", ["x 0 -> 1 | for self.x in range(3):", "x 1 -> 2 | for self.x in range(3):"]),
    ],
)  # fmt: skip
def test_changes_are_said_with_the_line_that_made_them(look: Look, method: str, said: list[str]) -> None:
    events = look(getattr(Sides(), method), f"{HERE}:Sides.{method}", attributes=True)
    source = Path(subjects.__file__).read_text().splitlines()
    found = [
        f"{one.name.removeprefix('Sides.')} {one.old} -> {one.new} | {source[int(one.at.rpartition(':')[2]) - 1].strip()}"
        for one in events
        if one.event == "set"
    ]
    names = {"LONG": "list of 200 (the first 64 compared)", "LONGER": "list of 201 (the first 64 compared)"}
    assert found == [" ".join(names.get(word, word) for word in line.split(" ")) for line in said]


def test_exceptions_are_raises(look: Look) -> None:
    """Fault 3: not an `end` with None."""
    events = look(Counter(1).saved, Counter, attributes=True)
    assert short(events) == [
        "run Counter.saved", "  run Counter.fail", "    set Counter.count 1 -> -1",
        "  raise Counter.fail ValueError: count is bad", "end Counter.saved",
    ]  # fmt: skip
    assert short(look(Counter(1).saved, Counter))[2] == "  raise Counter.fail ValueError: count is bad"


def test_exceptions_reach_the_program_unchanged(tmp_path: Path) -> None:
    with (
        meshwright.watch(Counter, attributes=True, output=tmp_path / "run"),
        pytest.raises(ValueError, match="bad") as seen,
    ):
        Counter(1).fail()
    names = [entry.name for entry in seen.traceback]
    assert names[-1] == "fail"
    source = Path(subjects.__file__).read_text().splitlines()
    assert "raise ValueError" in source[seen.traceback[-1].lineno]
    assert sys.exc_info() == (None, None, None)


def test_texts_that_are_no_unicode(look: Look) -> None:
    def work() -> None:
        with pytest.raises(ValueError, match="half"):
            subjects.refuse("half \ud83d")

    events = look(work, subjects.refuse)
    assert [one.text for one in events] == ["", "ValueError: half ?"]


def test_other_threads(look: Look) -> None:
    """Fault 4."""
    events = look(lambda: subjects.in_threads(3), [subjects.factorial, subjects.in_threads])
    by_thread: dict[str, list[str]] = {}
    for one, line in zip(events, short(events), strict=True):
        by_thread.setdefault(one.thread, []).append(line)
    assert by_thread.pop("MainThread") == ["run in_threads", "end in_threads"]
    assert by_thread == {
        f"worker-{i}": ["run factorial", "  run factorial", "  end factorial", "end factorial"] for i in range(3)
    }


def test_no_signal_handlers_and_nothing_on_the_terminal(look: Look, capfd: pytest.CaptureFixture[str]) -> None:
    """Faults 8 and 10."""
    before = {one: signal.getsignal(one) for one in signal.valid_signals()}

    def work() -> None:
        assert {one: signal.getsignal(one) for one in signal.valid_signals()} == before
        subjects.factorial(2)

    assert len(look(work, subjects.factorial)) == 4
    assert capfd.readouterr() == ("", "")


def test_events_are_written_while_the_program_runs(tmp_path: Path) -> None:
    """Fault 7: not held until the end."""
    with meshwright.watch(subjects.factorial, output=tmp_path / "run"):
        subjects.factorial(1)
        deadline = time.monotonic() + 10
        while not (tmp_path / "run.rank0.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [one.event for one in read(str(tmp_path / "run.rank0.jsonl"))] == ["start", "run", "end"]


def test_memory_is_bounded_and_nothing_is_lost(look: Look) -> None:
    from meshwright.watcher.events.stream import FULL

    calls = FULL + 7
    events = look(lambda: [subjects.factorial(1) for _ in range(calls)], subjects.factorial)
    assert len(events) == 2 * calls


def test_properties_class_and_static_methods(look: Look) -> None:
    def work() -> None:
        made = Counter.make()
        assert (made.double, made.twice(4)) == (2, 8)

    found = short(look(work, f"{HERE}:Counter", attributes=["count"]))
    assert found == [
        "run Counter.make", "  run Counter.__init__", "    set Counter.count None -> 1", "  end Counter.__init__",
        "end Counter.make", "run Counter.double", "end Counter.double", "run Counter.twice", "end Counter.twice",
    ]  # fmt: skip


def test_slots(look: Look) -> None:
    def work() -> None:
        thing = Slotted()
        thing.grow()
        thing.shrink()

    found = [line.strip() for line in short(look(work, Slotted, attributes=True)) if "set" in line or "del" in line]
    assert found == [
        "set Slotted.x None -> 1", "set Slotted._Slotted__hidden None -> 2", "set Slotted.y None -> 5",
        "set Slotted.x 1 -> 2", "del Slotted.y",
    ]  # fmt: skip


def test_deleted_attributes(look: Look) -> None:
    events = look(Counter(4).remove, Counter, attributes=True)
    assert [(one.event, one.name, one.old) for one in events][1] == ("del", "Counter.count", "4")


def test_inherited_and_overridden_methods(look: Look) -> None:
    def work() -> None:
        Child(1).add(2)

    assert short(look(work, f"{HERE}:Counter.add", attributes=True)) == [
        "run Counter.add", "  set Child.count 1 -> 21", "end Counter.add",
    ]  # fmt: skip
    assert short(look(work, f"{HERE}:Child")) == ["run Child.add", "end Child.add"]
    assert short(look(lambda: Child(1).keep(1), f"{HERE}:Child.keep")) == ["run Counter.keep", "end Counter.keep"]


def test_classes_that_a_module_has_from_another(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.nn:Linear, which lies in torch.nn.modules.linear."""
    found = short(look(lambda: json.JSONDecoder().decode("[1]"), "json:JSONDecoder"))
    assert found == [
        "run JSONDecoder.__init__", "end JSONDecoder.__init__",
        "run JSONDecoder.decode", "  run JSONDecoder.raw_decode", "  end JSONDecoder.raw_decode", "end JSONDecoder.decode",
    ]  # fmt: skip
    monkeypatch.setattr(json.JSONDecoder, "__module__", "json")  # as some packages tell it
    assert short(look(lambda: json.JSONDecoder().decode("[1]"), "json:JSONDecoder")) == found
    monkeypatch.setattr(subjects, "Other", Counter, raising=False)
    assert short(look(lambda: Counter(1).nothing(), f"{HERE}:Other"))[-1] == "end Counter.nothing"


@pytest.mark.parametrize("name", ["shouted", "asked", "remembered"])
def test_decorated_functions(look: Look, name: str) -> None:
    subjects.remembered.cache_clear()
    work = lambda: getattr(subjects, name)(1)  # noqa: E731
    assert f"run {name}" in [line.strip() for line in short(look(work, f"{HERE}:{name}"))]


def test_functions_inside_functions(look: Look) -> None:
    def work() -> None:
        assert subjects.ADDER(1) == 11  # made before the watch began
        assert subjects.outside(2)(3) == 5

    names = [one.name for one in look(work, f"{HERE}:outside") if one.event == "run"]
    assert names == ["outside.<locals>.inside", "outside", "outside.<locals>.inside"]
    names = [one.name for one in look(work, f"{HERE}:outside.<locals>.inside") if one.event == "run"]
    assert names == ["outside.<locals>.inside"] * 2


def test_a_whole_module_leaves_others_alone(look: Look) -> None:
    names = {one.name for one in look(lambda: subjects.in_threads(1), HERE)}
    assert names == {"in_threads", "factorial"}
    assert {one.name for one in look(lambda: subjects.factorial(2), subjects)} == {"factorial"}


def test_locals_and_globals(look: Look) -> None:
    found = short(look(lambda: subjects.local_changes(3), subjects.local_changes, locals=["total"]))
    assert [line.strip() for line in found if "set" in line] == [
        "set total None -> 0", "set total 0 -> 1", "set total 1 -> 3",
    ]  # fmt: skip
    before = subjects.LIMIT
    found = short(look(lambda: subjects.set_limit(before + 1), subjects.set_limit, globals=["LIM*"]))
    assert found[1] == f"  set global LIMIT {before} -> {before + 1}"


def test_everything_is_put_back(look: Look) -> None:
    codes = {name: value.__code__ for name, value in vars(Counter).items() if hasattr(value, "__code__")}
    look(lambda: Counter(1).add(1), Counter, attributes=True)
    assert {name: vars(Counter)[name].__code__ for name in codes} == codes


def test_nothing_is_kept_alive(tmp_path: Path) -> None:
    import weakref

    with meshwright.watch([Counter, subjects.takes], attributes=True, locals=True, output=tmp_path / "run"):
        counter = Counter(1)
        subjects.takes(counter)
        gone = weakref.ref(counter)
        del counter
        gc.collect()
        assert gone() is None


def test_our_own_looking_is_not_watched(look: Look) -> None:
    class Shows:
        def call(self, name: str, frame: object) -> str:
            return repr(subjects.Loud())

    found = short(look(lambda: subjects.takes(1), HERE, wrapper=Shows))
    assert found == ["run takes Loud(6)", "end takes"]


def test_objects_that_cannot_be_looked_at(look: Look) -> None:
    class Strange:
        def __getattribute__(self, name: str) -> object:
            if name == "__dict__":
                raise RuntimeError("keep out")
            return super().__getattribute__(name)

        def work(self) -> str:
            self.x = 1
            return "done"

    answer = []
    events = look(lambda: answer.append(Strange().work()), Strange.work, attributes=True)
    assert answer == ["done"]
    assert "not seen: RuntimeError: keep out" in {one.text for one in events}
    assert [one.event for one in events if one.event != "note"] == ["run", "end"]


def test_two_watches_at_once(tmp_path: Path) -> None:
    with meshwright.watch(subjects.factorial, output=tmp_path / "a"):
        with meshwright.watch(subjects.factorial, attributes=True, output=tmp_path / "b"):
            assert subjects.factorial(2) == 2
        subjects.factorial(1)
    assert len(read(str(tmp_path / "a.rank0.jsonl"))) == 2 + 4 + 2
    assert len(read(str(tmp_path / "b.rank0.jsonl"))) == 2 + 4


def test_watches_that_do_not_nest(tmp_path: Path) -> None:
    first = meshwright.watch(subjects.factorial, output=tmp_path / "a").start()
    second = meshwright.watch(subjects.factorial, output=tmp_path / "b").start()
    first.stop()
    assert subjects.factorial(3) == 6
    second.stop()
    assert subjects.factorial(3) == 6
    assert not (tmp_path / "a.rank0.jsonl").exists()
    assert len(read(str(tmp_path / "b.rank0.jsonl"))) == 2 + 6


def test_a_watch_can_begin_again(tmp_path: Path) -> None:
    watch = meshwright.watch(subjects.factorial, output=tmp_path / "run")
    for _ in range(2):
        with watch:
            subjects.factorial(1)
        assert short(read(str(tmp_path / "run.rank0.jsonl")))[1:-1][-2:] == ["run factorial", "end factorial"]
        (tmp_path / "run.rank0.jsonl").unlink()
