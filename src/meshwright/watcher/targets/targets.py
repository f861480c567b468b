"""Targets of a watch: 'pkg.module', 'pkg.module:Class', 'pkg.module:Class.method', 'pkg.module:function', or objects.

A target becomes code objects, so that every function with that code is watched: decorated, imported under another name,
bound or inherited.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, GetSetDescriptorType, MethodType, ModuleType
from typing import Any

from meshwright.errors import InputError, closest_names
from meshwright.watcher.targets.decorated import made_before
from meshwright.watcher.targets.outline import Outline

_MANY = 24  # names in a message
_BARE = frozenset({str, int, float, bool, type(None), tuple, dict, GetSetDescriptorType})  # types that wrap nothing


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a watch: a module, and a name in it.

    >>> Target.parse("train:Trainer.step")
    Target(module='train', name='Trainer.step')
    """

    module: str
    name: str = ""  # "" for the whole module

    @staticmethod
    def parse(text: str) -> Target:
        module, colon, name = text.strip().partition(":")
        name = name.removesuffix("()")
        if not module or (colon and not name) or not all(part for part in name.split(".")[1:]):
            valid = "pkg.module, pkg.module:Class, pkg.module:Class.method, pkg.module:function"
            raise InputError(f"'{text}' names nothing", field="target", valid=valid)
        return Target(module, name)

    def __str__(self) -> str:
        return f"{self.module}:{self.name}" if self.name else self.module


@dataclass(slots=True)
class Found:
    """Existing functions, and all code objects to watch, including those inside functions."""

    functions: list[FunctionType]
    codes: list[CodeType]
    others: bool = True  # True if calls may have created more functions with one of the codes


def target_of(thing: Any) -> Target | FunctionType | type | ModuleType:
    """Return a checked target from a user's name or object."""
    if isinstance(thing, str):
        return Target.parse(thing)
    if isinstance(thing, MethodType):
        thing = thing.__func__
    if isinstance(thing, property | staticmethod | classmethod | functools.cached_property) or hasattr(
        thing, "__wrapped__"
    ):
        inner = next(iter(_functions(thing)), None)
        thing = inner if inner is not None else thing
    if isinstance(thing, Target | FunctionType | type | ModuleType):
        return thing
    kind = type(thing).__name__
    raise InputError(
        f"a {kind} has no Python code to watch", field="targets", valid="names, functions, classes, modules"
    )


def name_of(thing: Target | FunctionType | type | ModuleType) -> str:
    """Return the target as a name that another process understands."""
    if isinstance(thing, Target | ModuleType):
        return str(thing) if isinstance(thing, Target) else thing.__name__
    return f"{thing.__module__}:{thing.__qualname__}"


def resolve(target: Target | FunctionType | type | ModuleType) -> Found:
    if isinstance(target, Target):
        module = imported(target)
        return in_module(module, target)
    if isinstance(target, FunctionType):
        return Found([target], list(inside(target.__code__)))
    if isinstance(target, ModuleType):
        return in_module(target, Target(target.__name__))
    found = list(_of_class(target, sys.modules.get(target.__module__)))
    return _all(found, f"the class {target.__qualname__}")


def imported(target: Target) -> ModuleType:
    if target.module in sys.modules:
        return sys.modules[target.module]
    try:
        return importlib.import_module(target.module)
    except ImportError as error:
        raise InputError(f"'{target.module}' cannot be imported: {error}", field="target") from None


def in_module(module: ModuleType, target: Target) -> Found:
    """Return the part of a module that a target names."""
    functions = list(_of_module(module))
    if not target.name:
        return _all(functions, target.module)
    wanted = [one for one in functions if _within(one.__code__.co_qualname, target.name)]
    thing: Any = module
    for part in target.name.split("."):  # inherited methods have the name of another class
        thing = inspect.getattr_static(thing, part, None)
    if isinstance(thing, type) and not wanted:
        wanted = _elsewhere(thing)
    wanted += [one for one in _functions(thing) if one not in wanted]
    codes = [code for one in functions for code in inside(one.__code__) if _within(code.co_qualname, target.name)]
    if not wanted and not codes:
        raise nothing(target, module, [one.__code__ for one in functions], thing)
    codes += [code for one in wanted for code in inside(one.__code__)]
    return Found(functions + [one for one in wanted if one not in functions], list({id(c): c for c in codes}.values()))


def _elsewhere(kind: type) -> list[FunctionType]:
    """Return functions of a class imported from elsewhere: those from its `__module__`, or all if none are."""
    return list(_of_class(kind, sys.modules.get(kind.__module__))) or list(_of_class(kind, None))


def in_code(code: CodeType, target: Target, source: str | bytes = b"") -> list[CodeType]:
    """Return the part of a module's code that a target names, before it has run."""
    all_ = [one for one in inside(code) if one is not code]
    wanted = [one for one in all_ if not target.name or _within(one.co_qualname, target.name)]
    if target.name and not wanted:
        return _in_source(code, target, all_, Outline(source))
    return wanted


def _in_source(code: CodeType, target: Target, codes: list[CodeType], outline: Outline) -> list[CodeType]:
    """Return code that only a module's source reveals: an inherited method, a lambda with a name."""
    if found := list(outline.lambda_of(code, target.name)):
        return [inner for one in found for inner in inside(one)]
    owner, _, method = target.name.rpartition(".")
    for base in outline.bases(owner):
        if found := [one for one in codes if _within(one.co_qualname, f"{base}.{method}")]:
            return found
    if target.name in outline.classes:
        bases = [*outline.bases(target.name), *outline.from_elsewhere(target.name)]
        problem = f"the class '{target.name}' defines no functions itself"
        raise InputError(problem, field="target", valid=", ".join(bases))
    there = [outline.target_of(target.name), *(f"{base}.{method}" for base in outline.from_elsewhere(owner))]
    if any(there):
        own = [one.co_qualname for one in codes if owner and _within(one.co_qualname, owner)]
        near = closest_names(target.name, own, limit=1)  # it may also be a typo
        hint = f" (did you mean {near[0]}?)" if near else ""
        rule = "what is imported or inherited is named by its own module"
        problem = f"'{target.name}' is not defined in '{target.module}'{hint}; {rule}"
        raise InputError(problem, field="target", valid=" or ".join(filter(None, there)))
    raise nothing(target, None, codes, None)


def nothing(target: Target, module: ModuleType | None, codes: Iterable[CodeType], thing: object) -> InputError:
    names = {code.co_qualname for code in codes if "<" not in code.co_qualname}
    names |= {name.rsplit(".", 1)[0] for name in names if "." in name}
    there = sorted(names)
    near = closest_names(target.name, there, limit=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    listed = ", ".join(there[:_MANY]) + ", ..." * (len(there) > _MANY)
    if thing is not None:
        problem = f"'{target.name}' of '{target.module}' has no Python code"
    else:
        problem = f"there is no '{target.name}' in '{target.module}'{hint}"
    return InputError(problem, field="target", valid=listed or "nothing: it defines no functions")


def inside(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of named functions in it; lambdas and comprehensions belong to the enclosing one."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            # a class body is no function, but contains them
            yield from (inner for inner in inside(one) if not inner.co_name.startswith("<") and inner.co_flags & 2)


def _within(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith((f"{wanted}.", f"{wanted}.<locals>."))


def _all(functions: Sequence[FunctionType], what: str) -> Found:
    if not functions:
        raise InputError(f"{what} defines no Python functions", field="target")
    near, others = made_before(functions)
    codes = {id(code): code for one in functions for code in inside(one.__code__)}
    return Found([*functions, *near], list(codes.values()), others)


def _of_module(module: ModuleType) -> Iterator[FunctionType]:
    file, seen = _file(module), set[int]()
    for thing in list(vars(module).values()):
        found = _of_class(thing, module) if isinstance(thing, type) else _functions(thing)
        for one in found:
            if id(one) not in seen and (one.__code__.co_filename == file or one.__module__ == module.__name__):
                seen.add(id(one))
                yield one


def _of_class(kind: type, module: ModuleType | None) -> Iterator[FunctionType]:
    if module is not None and kind.__module__ != module.__name__:
        return
    for thing in list(vars(kind).values()):
        if isinstance(thing, type):
            if thing.__qualname__.startswith(f"{kind.__qualname__}."):
                yield from _of_class(thing, module)
        else:
            # the method is watched, a foreign decorator's wrapper is not
            yield from (one for one in _functions(thing) if module is None or _is_from(one, module))


def _is_from(function: FunctionType, module: ModuleType) -> bool:
    file = _file(module)
    return function.__code__.co_filename == file if file else function.__module__ == module.__name__


def _functions(thing: Any, deep: int = 4) -> Iterator[FunctionType]:
    """Yield Python functions that an object is or wraps: decorators, properties, partials."""
    if deep == 0 or type(thing) in _BARE or isinstance(thing, type | ModuleType):
        return
    around: list[Any]
    if isinstance(thing, FunctionType):
        yield thing
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _filled(cell)]
        around = [
            one for one in cells if isinstance(one, FunctionType | staticmethod | classmethod | functools.partial)
        ]
    else:
        names = ("fget", "fset", "fdel", "__func__", "func", "__wrapped__")
        around = [inspect.getattr_static(thing, name, None) for name in ("__wrapped__",)]
        if isinstance(
            thing, property | staticmethod | classmethod | functools.partial | functools.cached_property | MethodType
        ):
            around += [getattr(thing, name, None) for name in names]
    seen = set[int]()
    for one in around:
        for function in _functions(one, deep - 1) if one is not None else ():
            if id(function) not in seen:
                seen.add(id(function))
                yield function


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _file(module: ModuleType) -> str:
    file = getattr(module, "__file__", None) or ""
    return file if file.endswith(".py") else os.path.splitext(file)[0] + ".py" if file else ""
