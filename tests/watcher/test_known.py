"""What is known of values, in C and in Python: both against copies, and a watch that is the same with either."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.watcher.values import unchanged as knowing
from meshwright.watcher.values.compiled import compiled
from meshwright.watcher.values.describe import first_bytes
from meshwright.watcher.values.marks import _Tensor
from meshwright.watcher.values.unchanged import EMPTY, Known, KnownTensor, Makers
from tests.watcher import subjects
from tests.watcher.seen import look_in, needs_c, short, without_compiler

PYTHON = Makers(Known, KnownTensor)


def all_makers() -> list[Any]:
    built = compiled()
    return [pytest.param(PYTHON, id="python"), *([pytest.param(Makers(*built), id="c")] if built else [])]


@needs_c
def test_c_is_built_where_it_can_be() -> None:
    """Else every test would say what Python does, twice."""
    assert compiled() is not None


def copied(items: dict[str, Any]) -> list[tuple[str, int, Any]]:
    """By brute force: names, identities, and what is inside."""
    return [
        (
            key,
            id(value),
            [*map(id, value)] if isinstance(value, list) else value.tolist() if torch.is_tensor(value) else 0,
        )
        for key, value in items.items()
    ]


def change(items: dict[str, Any], chance: random.Random, spare: list[Any]) -> None:
    """One of the things that programs do; `spare` keeps values alive, so that no identity comes again."""
    key = chance.choice([*items]) if items else "a"
    what = chance.randrange(7)
    if what == 0:
        items[key] = chance.choice([object(), [], [1], torch.zeros(2)])
    elif what == 1:
        items[f"n{chance.randrange(10**6)}"] = []
    elif what == 2 and items:
        del items[key]
    elif what == 3 and isinstance(items.get(key), list):
        items[key].append(object())
    elif what == 4 and isinstance(items.get(key), list) and items[key]:
        items[key][0] = object()
    elif what == 5 and torch.is_tensor(items.get(key)):
        items[key].add_(1)
    spare.append([*items.values(), *(one for value in items.values() if isinstance(value, list) for one in value)])


def inside(makers: Makers, value: Any) -> Any:
    if isinstance(value, list):
        return makers.known(None, [*map(id, value)], [None] * len(value)) if value else EMPTY
    if not torch.is_tensor(value):
        return None
    return makers.known_tensor(value._version, value.shape, value.data_ptr(), first_bytes(value))


@pytest.mark.parametrize("makers", all_makers())
def test_every_change_is_found_and_no_other(makers: Makers) -> None:
    """3,000 changes: what is different is what a copy says, and afterwards nothing is."""
    chance, spare = random.Random(8), list[Any]()
    items: dict[str, Any] = {"a": 1, "b": [], "c": torch.zeros(2), "d": [2]}
    known = makers.known([*items], [*map(id, items.values())], [inside(makers, one) for one in items.values()])
    for _ in range(3000):
        before = copied(items)
        change(items, chance, spare)
        after, moved = copied(items), known.moved(items)
        if [key for key, *_ in after][: len(before)] != [key for key, *_ in before]:
            assert moved is None
            known = makers.known([*items], [*map(id, items.values())], [inside(makers, one) for one in items.values()])
        else:
            different = [i for i, one in enumerate(after) if i >= len(before) or one != before[i]]
            assert moved is not None
            assert [place for place, _, _ in moved] == different
            assert all(items[key] is value for _, key, value in moved)
            for place, key, value in moved:
                known.put(place, key, value, inside(makers, value))
        assert known.same(items)
        assert len(known.moved(items)) == 0


@pytest.mark.parametrize("makers", all_makers())
def test_checking_may_empty_the_container(makers: Makers) -> None:
    """A checker of the program's own, which takes away what is checked next."""
    items: dict[str, Any] = {}

    class Clears:
        def same(self, _: object) -> bool:
            items.clear()
            return True

    items |= {"a": object(), "b": [object()], "c": [1]}
    checkers = [Clears(), inside(makers, items["b"]), inside(makers, items["c"])]
    known = makers.known([*items], [*map(id, items.values())], checkers)
    known.moved(items)
    assert known.moved(items) is None


@pytest.mark.parametrize("makers", all_makers())
def test_a_checker_that_fails_is_heard(makers: Makers) -> None:
    class Fails:
        def same(self, _: object) -> bool:
            raise ZeroDivisionError

    value = object()
    with pytest.raises(ZeroDivisionError):
        makers.known(["a"], [id(value)], [Fails()]).moved({"a": value})


@pytest.mark.parametrize("makers", all_makers())
def test_tensors_that_do_not_count(makers: Makers) -> None:
    with torch.inference_mode():
        tensor = torch.zeros(2)
    assert makers.known_tensor(-1, tensor.shape, tensor.data_ptr(), b"").same(tensor)
    assert not makers.known_tensor(-1, (3,), tensor.data_ptr(), b"").same(tensor)


@pytest.mark.parametrize("makers", all_makers())
def test_what_a_tensor_begins_with_is_compared(makers: Makers) -> None:
    """`.data` counts no version; of a tensor in pieces, or on no memory of this process, nothing is read."""
    tensor = torch.arange(100.0)
    known = makers.known_tensor(0, tensor.shape, tensor.data_ptr(), first_bytes(tensor))
    assert first_bytes(tensor) == tensor.numpy().tobytes()[:64]
    assert known.same(tensor)
    tensor.data[15] += 1
    assert tensor._version == 0
    assert not known.same(tensor)
    assert first_bytes(torch.ones(2)) == torch.ones(2).numpy().tobytes()
    make = makers.tensor_mark or _Tensor
    for odd in (torch.ones(1).expand(1000), torch.ones(3, device="meta"), torch.ones(0), torch.eye(3).to_sparse()):
        assert first_bytes(odd) == b""
        assert make(odd).same(odd)
    mark = make(tensor)
    tensor.data[0] = 7
    assert not mark.same(tensor)
    again = make(tensor)
    tensor.data[16] = 7  # further back
    assert again.same(tensor)


def work() -> None:
    net = torch.nn.Linear(2, 2)
    holder = subjects.Counter(0)
    for _ in range(3):
        holder.add(1)
        holder.keep(1)
        holder.replace(2)
        holder.saved()
        holder.outer()
        with torch.no_grad():
            net.weight.mul_(2)
        net(torch.ones(1, 2))
    holder.remove()
    subjects.local_changes(3)


OPTIONS = {"attributes": True, "locals": True, "wrapper": "plain"}
TARGETS = ["tests.watcher.subjects", "torch.nn.modules.module", "torch.nn.modules.linear"]


def test_a_watch_without_a_compiler_says_the_same(tmp_path: Path) -> None:
    expected = short(look_in(tmp_path)(work, TARGETS, **OPTIONS))
    with without_compiler():
        assert knowing.makers() == PYTHON
        assert short(look_in(tmp_path)(work, TARGETS, **OPTIONS)) == expected
    assert any("Linear._parameters" in line and "v2" in line for line in expected)


@pytest.mark.parametrize("held", ["near", "far"])
def test_functions_that_a_call_made_are_watched_wherever_they_are(
    held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decorator's inner function, in another module of the package, or in a list that only memory knows."""
    package = tmp_path / f"pack_{held}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "made.py").write_text("def around(f):\n    def inner():\n        return f()\n    return inner\n")
    (package / "user.py").write_text("from .made import around\n\n@around\ndef used():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__(f"pack_{held}.user")
    user = sys.modules[f"pack_{held}.user"]
    functions = [user.used]
    if held == "far":
        del user.used  # type: ignore[attr-defined]
    events = look_in(tmp_path)(lambda: functions[0](), f"pack_{held}.made")
    assert [one.name for one in events if one.event == "run"] == ["around.<locals>.inner"]


@needs_c
def test_c_refuses_lists_that_do_not_fit() -> None:
    """It would read behind their end."""
    makers = Makers(*(compiled() or ()))
    for keys, ids, checkers in [(["a"], [1, 2], [None, None]), (None, [1, 2], [None]), (["a"], [1], [])]:
        with pytest.raises(ValueError, match="lists of one length"):
            makers.known(keys, ids, checkers)
    with pytest.raises(TypeError, match="3 arguments are needed"):
        makers.known(None, [])  # type: ignore[call-arg]
