"""Find functions with watched code that were created before the watch began, mostly decorated ones in other modules."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType


def made_before(functions: Sequence[FunctionType]) -> tuple[list[FunctionType], bool]:
    """Return functions found nearby, and True if there may be more, so that a search of all memory is worth it."""
    missing = _missing(functions)
    near = list[FunctionType]()
    if missing:
        for one in _near({str(one.__module__).rpartition(".")[0] for one in functions} - {""}):
            if missing[id(one.__code__)]:
                missing[id(one.__code__)] -= 1
                near.append(one)
    return near, any(missing.values())


def _missing(functions: Sequence[FunctionType]) -> Counter[int]:
    """Count, by code inside these functions, its other references: functions with that code that are not listed."""
    known = Counter(id(one.__code__) for one in {id(one): one for one in functions}.values())
    missing = Counter[int]()

    def visit(constants: tuple[object, ...]) -> None:
        for one in constants:
            if isinstance(one, CodeType):
                # held by the constants, by `one`, and for now by the call itself
                more = sys.getrefcount(one) - 3 - known[id(one)]
                if more > 0:
                    missing[id(one)] = more
                visit(one.co_consts)

    for function in functions:
        visit(function.__code__.co_consts)
    return missing


def _near(packages: set[str]) -> Iterator[FunctionType]:
    """Yield functions of all modules of these packages, and those that they wrap; each once."""
    seen = set[int]()
    for name, module in list(sys.modules.items()):
        if name.rpartition(".")[0] not in packages:
            continue
        for thing in list(getattr(module, "__dict__", {}).values()):
            for one in list(vars(thing).values()) if isinstance(thing, type) else (thing,):
                if isinstance(one, FunctionType) and id(one) not in seen:
                    yield from _around(one, seen)


def _around(function: FunctionType, seen: set[int]) -> Iterator[FunctionType]:
    seen.add(id(function))
    yield function
    for cell in function.__closure__ or ():
        try:
            inner = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        if isinstance(inner, FunctionType) and id(inner) not in seen:
            yield from _around(inner, seen)
