"""Targets and options of a watch that cannot be: what is wrong is named, and what would be valid."""

from __future__ import annotations

import pytest

import meshwright
from meshwright.errors import InputError
from tests.watcher import subjects

HERE = "tests.watcher.subjects"


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (f"{HERE}:Countr", "there is no 'Countr'"),
        (f"{HERE}:Counter.ad", "did you mean Counter.add"),
        (f"{HERE}:LIMIT", "no Python code"),
        ("no_such_module_anywhere:x", "cannot be imported"),
        ("json:", "names nothing"),
        (len, "no Python code to watch"),
        (3, "no Python code to watch"),
        ("errno", "defines no Python functions"),
    ],
)
def test_targets_that_are_not_there(targets: object, said: str) -> None:
    with pytest.raises(InputError, match=said), meshwright.watch(targets):
        pass


def test_the_message_names_what_is_there() -> None:
    with pytest.raises(InputError) as seen, meshwright.watch(f"{HERE}:Countr"):
        pass
    assert "Counter.add" in seen.value.valid
    assert "did you mean Counter" in str(seen.value)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"ranks": [-1]}, "ranks"),
        ({"ranks": 1}, "ranks"),
        ({"ranks": []}, "ranks"),
        ({"attributes": 3}, "attributes"),
        ({"locals": [""]}, "locals"),
        ({"wrapper": "tensors"}, "wrapper"),
        ({"wrapper": "json:nothing"}, "wrapper"),
        ({"wrapper": object()}, "wrapper"),
        ({"output": "/no/such/folder/run"}, "output"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], field: str) -> None:
    with pytest.raises(InputError) as seen:
        meshwright.watch(subjects.factorial, **options)  # type: ignore[arg-type]
    assert seen.value.field == field


class Demanding:
    def __init__(self, how: str) -> None:
        self.how = how

    def call(self, name: str, frame: object) -> str:
        return self.how


@pytest.mark.parametrize(
    ("options", "field", "said"),
    [
        (
            {"wrapper": Demanding},
            "wrapper",
            "raises TypeError.*missing 1 required.*valid: a class that is made without",
        ),
        ({"output": 5}, "output", "is 5 .valid: a name for files"),
        ({"output": b"run"}, "output", "valid: a name for files"),
    ],
)
def test_options_that_cannot_be_used_say_what_can(options: dict[str, object], field: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as seen:
        meshwright.watch(subjects.factorial, **options)  # type: ignore[arg-type]
    assert seen.value.field == field
