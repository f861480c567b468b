"""Run a script or module as Python would, watched from its first line until its last thread has ended."""

from __future__ import annotations

import importlib.util
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from meshwright.errors import InputError, MeshwrightError
from meshwright.watcher.script import program as programs
from meshwright.watcher.session import Watch
from meshwright.watcher.targets.imported_later import Awaited
from meshwright.watcher.targets.targets import Found, Target, in_code, in_module


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a program."""

    code: int  # exit code
    never: list[str]  # targets whose modules it never imported
    mistaken: bool  # True if an imported module lacks a target


def run(
    words: Sequence[str], targets: Sequence[str], tell: Callable[[InputError], None], *, module: bool, **options: Any
) -> Ended:
    """Run a program with arguments under a watch, as Python would: show its errors, and wait for its threads.

    Without targets all of its own functions are watched. `tell` is called once with a target that turns out to be wrong
    when the program imports its module; the program goes on.
    """
    program = programs.module(words[0]) if module else programs.script(words[0])
    asked = [Target.parse(one) for one in targets] or [Target("__main__")]
    own = [one for one in asked if one.module in program.names]
    others = [one for one in asked if one not in own]
    sys.path.insert(0, program.folder)
    watch = Watch([one for one in others if one.module in sys.modules], **options)
    codes = [code for target in own for code in in_code(program.code, target, program.source)]
    _check({one.module for one in others})
    mistakes = set[Target]()

    def imported(now: ModuleType) -> None:
        found: dict[Target, Found] = {}
        for target in others:
            if target.module == now.__name__ and watch.wanted() and target not in mistakes:
                try:
                    found[target] = in_module(now, target)
                except InputError as problem:  # the program's own import does not fail for it
                    mistakes.add(target)
                    tell(problem)
        if found:
            watch.add(found)

    def start() -> None:
        if watch.wanted():
            watch.add({Target("__main__", one.name): Found([], []) for one in own})  # for child processes
            watch.backend().run(program.code, codes, programs.namespace(program))
        else:
            exec(program.code, programs.namespace(program))

    sys.argv = [program.called, *words[1:]]
    with watch, Awaited({one.module for one in others}, imported) as awaited:
        code = _to_its_end(start)
    return Ended(code, sorted(awaited.missing), bool(mistakes))


def _check(modules: set[str]) -> None:
    for name in modules - sys.modules.keys():
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise InputError(f"there is no module '{name}'", field="target", valid="modules that Python can import")


def _to_its_end(start: Callable[[], None]) -> int:
    """Return the exit code, once no thread is left that Python would wait for."""
    code = 0
    try:
        start()
    except SystemExit as left:
        code = _exit_code(left)
    except BaseException as error:
        if isinstance(error, MeshwrightError) and not _from_program(error):
            raise
        _say_error(error)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    try:
        vars(threading)["_shutdown"]()  # Python calls this as its last act, and may call it again then
    except BaseException as error:  # Ctrl-C: Python reports it, and ends as it would have
        _say_error(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
    return code


def _exit_code(left: SystemExit) -> int:
    if left.code is None or isinstance(left.code, int):
        return left.code or 0
    if sys.stderr is not None:
        sys.stderr.write(f"{left.code}\n")  # a text, which Python prints
    return 1


def _from_program(error: BaseException) -> bool:
    """Return True if the program itself raised it."""
    return any(frame.f_globals.get("__name__") == "__main__" for frame, _ in traceback.walk_tb(error.__traceback__))


def _say_error(error: BaseException) -> None:
    """Print the traceback as the program would by itself: without our frames above it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
        trace = trace.tb_next
    error = error.with_traceback(trace or error.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)  # the program may have set its own
