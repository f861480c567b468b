"""Exempt watched functions from `torch.compile` on Python 3.11, which cannot compile hooks: they run uncompiled.

PyTorch has settings for this: single codes can be skipped, and so are our files. If a watched function would be inlined
into another one, that one is skipped too, with PyTorch's warning. Unwatched functions are compiled as always.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import CodeType, ModuleType
from typing import Any

from meshwright.watcher.targets.imported_later import Awaited

_COMPILER = "torch._dynamo"
_ACTIVE: list[Uncompiled] = []  # watches may end in any order: the last one restores what the first one found


class Uncompiled:
    """Codes that are not compiled from now on, also if PyTorch is imported later."""

    def __init__(self) -> None:
        self._codes: list[CodeType] = []
        self._config: Any = None
        self._skip: Any = None
        self._before = False
        here = sys.modules.get(_COMPILER)
        self._awaited = Awaited(set() if here else {_COMPILER}, self._imported)
        self._awaited.__enter__()
        if here:
            self._imported(here)

    def add(self, code: CodeType) -> None:
        if self._config is None:
            self._codes.append(code)
        else:
            self._skip(code)

    def end(self) -> None:
        """Stop suppressing errors of the compiler."""
        self._awaited.__exit__()
        if self._config is not None:
            _ACTIVE.remove(self)
            if not _ACTIVE:
                self._config.suppress_errors = self._before

    def _imported(self, module: ModuleType) -> None:
        self._config = importlib.import_module(f"{_COMPILER}.config")
        self._skip = importlib.import_module(f"{_COMPILER}.eval_frame").skip_code
        self._before = _ACTIVE[0]._before if _ACTIVE else self._config.suppress_errors
        self._config.suppress_errors = True
        _ACTIVE.append(self)
        _leave_us_out()
        for code in self._codes:
            self._skip(code)
        self._codes.clear()


@cache
def _leave_us_out() -> None:
    """Exempt our own hooks from compilation."""
    importlib.import_module(f"{_COMPILER}.trace_rules").add(__package__)
