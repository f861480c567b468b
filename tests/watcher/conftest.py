"""What tests of the watch share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from meshwright.watcher.values.compiled import compiled
from tests.watcher.seen import Look, look_in, without_compiler

EITHER = [pytest.param(without_compiler, id="python"), *([pytest.param(nullcontext, id="c")] if compiled() else [])]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    return look_in(tmp_path)


@pytest.fixture(params=EITHER)
def either(request: pytest.FixtureRequest) -> Iterator[None]:
    """Steps of a call in C, and in Python."""
    with request.param():
        yield
