"""A program as Python would find it: its code, its name for targets, and its namespace."""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from meshwright.errors import InputError


@dataclass(frozen=True, slots=True)
class Program:
    code: CodeType
    source: str | bytes  # empty if only compiled code exists
    path: str  # absolute, as Python makes it
    called: str  # its sys.argv[0]
    names: frozenset[str]  # names that a target may use for it
    spec: ModuleSpec | None  # of a module; None for a script
    folder: str  # first on sys.path


def namespace(program: Program) -> dict[str, Any]:
    """Return a new `__main__` namespace, with all that Python puts into it."""
    main = ModuleType("__main__")
    main.__file__, main.__spec__ = program.path, program.spec
    main.__loader__ = program.spec.loader if program.spec else SourceFileLoader("__main__", program.path)
    main.__package__ = program.spec.parent if program.spec else None
    main.__dict__["__cached__"] = program.spec.cached if program.spec else None
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    return main.__dict__


def script(path: str) -> Program:
    where = os.path.join(os.getcwd(), path)  # not shortened: tracebacks show it as Python's own do
    try:
        with open(path, "rb") as file:
            source = file.read()
        code = compile(source, where, "exec", dont_inherit=True)
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
    return Program(code, source, where, path, names, None, os.path.dirname(os.path.realpath(path)))


def module(name: str) -> Program:
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
        loader: Any = spec.loader if spec is not None else None
        code = loader.get_code(spec.name) if loader is not None and spec is not None else None
        source = loader.get_source(spec.name) if spec is not None and hasattr(loader, "get_source") else None
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise InputError(f"module '{name}' cannot be run: {error}", field="-m") from None
    finally:
        sys.path.pop(0)
    if spec is None or code is None:
        raise InputError(f"there is no module '{name}' that can be run", field="-m")
    path = spec.origin or name
    names = frozenset({"__main__", name, spec.name})
    return Program(code, source or b"", path, path, names, spec, os.getcwd())
