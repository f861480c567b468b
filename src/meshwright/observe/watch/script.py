"""A script or module run as Python would run it, watched from its first line."""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from meshwright.errors import InputError
from meshwright.observe.watch.later import Awaited
from meshwright.observe.watch.session import Watch
from meshwright.observe.watch.targets import Found, Target, in_code, in_module


@dataclass(frozen=True, slots=True)
class Program:
    code: CodeType
    path: str
    names: frozenset[str]  # what a target may call it
    spec: ModuleSpec | None  # of a module; a script has none
    folder: str  # first on the path


def run(words: Sequence[str], targets: Sequence[str], *, module: bool, **options: Any) -> list[str]:
    """Run a program with arguments under a watch; returns targets whose modules it never imported.

    What the program raises, it raises: also SystemExit. Without targets all of the program's own functions are watched.
    """
    program = _module(words[0]) if module else _script(words[0])
    asked = [Target.parse(one) for one in targets] or [Target("__main__")]
    own = [one for one in asked if one.module in program.names]
    others = [one for one in asked if one not in own]
    sys.path.insert(0, program.folder)
    watch = Watch([one for one in others if one.module in sys.modules], **options)
    codes = [code for target in own for code in in_code(program.code, target)]
    waiting = {one.module for one in others if one.module not in sys.modules}
    for name in waiting:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise InputError(f"there is no module '{name}'", field="target", valid="modules that Python can import")
    problems: list[InputError] = []

    def imported(now: ModuleType) -> None:
        try:
            for target in others:
                if target.module == now.__name__ and watch.wanted():
                    watch.add(target, in_module(now, target))
        except InputError as problem:
            problems.append(problem)
            raise

    sys.argv = [program.path, *words[1:]]
    with watch, Awaited(waiting, imported) as awaited:
        try:
            if watch.wanted():
                for target in own:
                    watch.add(Target("__main__", target.name), Found([], []))  # for processes that it starts
                watch.backend().run(program.code, codes, _namespace(program))
            else:
                exec(program.code, _namespace(program))
        except BaseException:
            if problems:
                raise problems[0].with_traceback(None) from None
            raise
    return sorted(awaited.missing)


def from_program(error: BaseException) -> bool:
    """Whether the program itself raised it."""
    return any(frame.f_globals.get("__name__") == "__main__" for frame, _ in traceback.walk_tb(error.__traceback__))


def say_error(error: BaseException) -> None:
    """The traceback as the program would have shown it by itself: without our frames above it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") != "__main__":
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)


def _namespace(program: Program) -> dict[str, Any]:
    main = ModuleType("__main__")
    main.__file__, main.__spec__ = program.path, program.spec
    main.__loader__ = program.spec.loader if program.spec else SourceFileLoader("__main__", program.path)
    main.__package__ = program.spec.parent if program.spec else None
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main.__dict__


def _script(path: str) -> Program:
    try:
        with open(path, "rb") as file:
            source = file.read()
        code = compile(source, path, "exec", dont_inherit=True)
    except FileNotFoundError:
        raise InputError("no such file", file=path) from None
    except IsADirectoryError:
        raise InputError("is a folder, expected a script", file=path) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror or error}", file=path) from None
    except SyntaxError as error:
        problem = f"is no Python: {error.msg}"
        raise InputError(problem, file=path, line=error.lineno or 0, column=error.offset or 0) from None
    except ValueError as error:  # null bytes
        raise InputError(f"is no Python: {error}", file=path) from None
    name = os.path.basename(path)
    names = frozenset({"__main__", path, name, os.path.splitext(name)[0]})
    return Program(code, path, names, None, os.path.dirname(os.path.abspath(path)))


def _module(name: str) -> Program:
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        loader: Any = spec.loader if spec is not None else None
        code = loader.get_code(spec.name) if loader is not None and spec is not None else None
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise InputError(f"module '{name}' cannot be run: {error}", field="-m") from None
    finally:
        sys.path.pop(0)
    if spec is None or code is None:
        raise InputError(f"there is no module '{name}' that can be run", field="-m")
    return Program(code, spec.origin or name, frozenset({"__main__", name, spec.name}), spec, os.getcwd())
