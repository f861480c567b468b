"""Watched code does what it did: the standard library under a watch, and codes of every form put together again."""

from __future__ import annotations

import argparse
import bisect
import dis
import importlib
import inspect
import json
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

import meshwright
from tests.packages import installed
from tests.watcher.seen import look_in, needs_c

OLD = pytest.mark.skipif(sys.version_info >= (3, 12), reason="bytecode is rewritten on Python 3.11 only")
MODULES = [
    "argparse", "ast", "asyncio.base_events", "asyncio.tasks", "contextlib", "dataclasses", "difflib", "enum", "heapq",
    "inspect", "json.encoder", "random", "statistics", "tarfile", "textwrap", "typing", "zipfile",
]  # fmt: skip


def codes(code: CodeType) -> list[CodeType]:
    return [code, *(inner for one in code.co_consts if isinstance(one, CodeType) for inner in codes(one))]


def all_codes(name: str) -> list[CodeType]:
    module = importlib.import_module(name)
    return codes(compile(Path(str(module.__file__)).read_text(), str(module.__file__), "exec"))[1:]


@OLD
@pytest.mark.parametrize("name", MODULES)
def test_taken_apart_and_put_together_is_the_same(name: str) -> None:
    from meshwright.watcher.bytecode.assemble import put_together
    from meshwright.watcher.hooks.points import decode

    for code in all_codes(name):
        again = put_together(code, decode(code), {}, code.co_consts, b"")
        assert again.co_code == code.co_code
        assert again.co_exceptiontable == code.co_exceptiontable
        assert list(again.co_positions()) == list(code.co_positions())


@OLD
@pytest.mark.parametrize("name", MODULES)
def test_what_is_added_leaves_the_rest_as_it_was(name: str) -> None:
    """Without our calls, the same instructions on the same lines, jumps to the same ones, the same handlers."""
    from meshwright.watcher.bytecode.rewrite import hooked
    from meshwright.watcher.hooks.hooks import Hooks
    from meshwright.watcher.hooks.points import Point, decode

    def nothing(*_: object) -> None:
        """A hook."""

    for code in all_codes(name):
        if not code.co_flags & inspect.CO_OPTIMIZED:
            continue  # bodies of classes are not watched
        self_ = code.co_argcount > 0
        everywhere = {one.start: Point(1, (), frame=True, whole=True) for one in list(decode(code))[4:]}
        new = hooked(code, Hooks(nothing, nothing, nothing, nothing, nothing, nothing, everywhere, wants_self=self_))
        assert original(new) == original(code)
        assert len(list(dis.get_instructions(new))) > 6 * len(everywhere)
        assert new.co_stacksize >= code.co_stacksize + 4


def original(code: CodeType) -> list[tuple[Any, ...]]:
    """Instructions that are not ours, with lines, and with jumps and handlers by their number among these."""
    all_ = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    ours = set[int]()
    for i, one in enumerate(all_):
        if one.opname == "LOAD_CONST" and "nothing" in (getattr(one.argval, "__name__", ""), _calls(one.argval)):
            end = next(j for j in range(i, len(all_)) if all_[j].opname == "POP_TOP")
            ours |= set(range(i - 1, end + 1))
    end_ = len(all_) - 24 * bool(ours)  # so many instructions at the end pass an exception on
    kept = [one for i, one in enumerate(all_[:end_]) if i not in ours]
    offsets = [one.offset for one in kept]

    def number(offset: int) -> int:  # of the first kept instruction at or after a place
        return bisect.bisect_left(offsets, offset)

    rows = []
    for one in kept:
        handlers = [
            (number(entry.target), entry.depth, entry.lasti)
            for entry in dis._parse_exception_table(code)  # type: ignore[attr-defined]
            if entry.start <= one.offset < entry.end and number(entry.target) < len(kept)
        ]
        jump = number(one.argval) if one.opcode in dis.hasjrel else one.arg
        line = one.positions.lineno if one.positions else None
        rows.append((one.opname, jump, line, handlers))
    return rows


def _calls(constant: object) -> str:
    """The hook that a constant of ours calls, where C makes these."""
    return "nothing" if type(constant).__name__ == "Hook" else ""


@OLD
@needs_c
@pytest.mark.skipif(not installed("ray"), reason="ray is not installed")
def test_a_watched_code_has_a_hash_and_is_pickled_as_one_that_does_nothing_else(tmp_path: Path) -> None:
    """As Ray does with functions of a script; whoever unpickles it needs nothing of ours."""
    script = tmp_path / "ships.py"
    script.write_text(SHIPS)
    out = tmp_path / "copy.pickle"
    watch = [sys.executable, "-m", "meshwright", "watch", str(script), "--attributes", "*", "--locals", "*"]
    done = subprocess.run([*watch, "--wrapper", "plain", "--", str(out)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "55 [0, 1, 4] 7\n"
    load = (
        f"import pickle, sys; f, g, C = pickle.load(open({str(out)!r}, 'rb')); print(f(10), list(g(3)), C().add(7)); "
    )
    load += "print([name for name in sys.modules if name.startswith('meshwright')])"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True)
    assert done.stdout == "55 [0, 1, 4] 7\n[]\n", done.stderr


SHIPS = """
import sys
from ray import cloudpickle

def total(n):
    found = 0
    for i in range(n + 1):
        found += i
    return found

def squares(n):
    for i in range(n):
        yield i * i

class Sum:
    def __init__(self):
        self.all = 0
    def add(self, n):
        try:
            self.all += n
        finally:
            return self.all

assert {total.__code__: 1}[total.__code__] == 1
with open(sys.argv[1], "wb") as file:
    cloudpickle.dump((total, squares, Sum), file)
print(total(10), list(squares(3)), Sum().add(7))
"""


def test_functions_longer_than_a_byte_can_jump(tmp_path: Path) -> None:
    lines = "\n".join(f"        x = x + {i}\n        if x % 7 == {i % 7}: x += 1" for i in range(300))
    source = f"def long(n):\n    x = 0\n    for i in range(n):\n{lines}\n    return x\n"
    space: dict[str, Any] = {"__name__": "made"}
    exec(compile(source, "made.py", "exec"), space)
    plain = FunctionType(space["long"].__code__, space)(3)
    seen = []
    events = look_in(tmp_path)(lambda: seen.append(space["long"](3)), space["long"], locals=["x"])
    assert seen == [plain]
    assert events[-2].new == str(plain)


def work() -> list[Any]:
    """Answers of the standard library that take many ways through it."""
    parser = argparse.ArgumentParser(prog="x")
    parser.add_argument("--n", type=int, default=3)
    parser.add_argument("words", nargs="*")
    generator = random.Random(7)
    data = [{"a": [generator.random(), None, "text" * 5], "b": {"c": generator.randint(0, 9)}} for _ in range(5)]
    return [
        vars(parser.parse_args(["--n", "5", "p", "q"])), parser.format_help(), json.dumps(data, indent=2),
        json.loads(json.dumps(data)), textwrap.fill("many words " * 40, 33), generator.sample(range(100), 9),
        generator.choices("abc", [1, 2, 3], k=9), generator.gauss(0, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"attributes": True}, {"locals": True}, {"wrapper": "plain"}])
def test_watched_libraries_give_the_same_answers(tmp_path: Path, more: dict[str, Any]) -> None:
    plain, seen = work(), []
    targets = ["argparse", "json", "json.encoder", "json.decoder", "textwrap", "random"]
    events = look_in(tmp_path)(lambda: seen.append(work()), targets, **more)
    assert seen == [plain]
    calls = [one for one in events if one.event in ("run", "resume", "end", "yield", "raise")]
    assert len(calls) > 500
    open_: list[str] = []
    for one in calls:
        if one.event in ("run", "resume"):
            assert one.depth == len(open_)
            open_.append(one.name)
        else:
            assert open_.pop() == one.name
            assert one.depth == len(open_)
    assert open_ == []


def test_tracebacks_show_the_same_lines(tmp_path: Path) -> None:
    import traceback

    def failing() -> str:
        try:
            json.loads('{"a": }')
        except json.JSONDecodeError:
            return traceback.format_exc()
        return ""

    plain = failing()
    with meshwright.watch(["json", "json.decoder"], attributes=True, locals=True, output=tmp_path / "run"):
        assert failing() == plain


@OLD
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0)], ids=str)
def test_watches_that_end_in_any_order_leave_nothing(tmp_path: Path, order: tuple[int, ...]) -> None:
    def step() -> int:
        return 1

    before = step.__code__
    watches = [meshwright.watch(step, output=str(tmp_path / f"run{i}")) for i in range(3)]
    for watch in watches:
        watch.start()
    for i in order:
        assert step.__code__ is not before
        watches[i].stop()
        step()
    assert step.__code__ is before


@OLD
def test_a_frame_that_an_exception_has_left_says_where(tmp_path: Path) -> None:
    def raises() -> int:
        if len("a") == 1:
            raise KeyError("x")
        return 1

    def work() -> None:
        with pytest.raises(KeyError) as caught:
            raises()
        trace = caught.value.__traceback__
        while trace and trace.tb_next:
            trace = trace.tb_next
        assert trace is not None
        assert trace.tb_frame.f_lineno == trace.tb_lineno == raises.__code__.co_firstlineno + 2

    look_in(tmp_path)(work, raises)
