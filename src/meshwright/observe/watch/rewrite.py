"""Python 3.11: the watched functions themselves get calls to our hooks, so that all other code runs as it did.

A trace function (`sys.settrace`) would slow down every instruction of the thread, also of code nobody asked about.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType

from meshwright.observe.watch.assemble import OP, Instruction, call, put_together, take_apart
from meshwright.observe.watch.hooks import Hooks

Make = Callable[[CodeType], Hooks]
FRAMES_UP = 1  # hooks are called by the watched frame itself


class Rewritten:
    """Functions with their old code, to be put back."""

    def __init__(self, make: Make) -> None:
        self._make, self._old = make, list[tuple[FunctionType, CodeType, CodeType]]()

    def install(self, functions: Iterable[FunctionType], codes: Iterable[CodeType]) -> None:
        wanted = {id(code): code for code in codes}
        done: dict[int, CodeType] = {}
        found = list(functions)
        inner = [code for code in wanted.values() if "<locals>" in code.co_qualname]
        if inner:  # functions that were made by a watched or unwatched call before this one
            found += [one for one in gc.get_referrers(*inner) if isinstance(one, FunctionType)]
        for function in found:
            old = function.__code__
            new = self.rewritten(old, wanted, done)
            if new is not old:
                self._old.append((function, old, new))
                function.__code__ = new

    def rewritten(self, code: CodeType, wanted: dict[int, CodeType], done: dict[int, CodeType]) -> CodeType:
        """The code with hooks where it is wanted, and so for every code inside it."""
        if id(code) not in done:
            constants = tuple(
                self.rewritten(one, wanted, done) if isinstance(one, CodeType) else one for one in code.co_consts
            )
            if any(new is not old for new, old in zip(constants, code.co_consts, strict=True)):
                done[id(code)] = code.replace(co_consts=constants)
            else:
                done[id(code)] = code
            if id(code) in wanted:
                done[id(code)] = hooked(done[id(code)], self._make(code))
        return done[id(code)]

    def run(self, code: CodeType, codes: Iterable[CodeType], namespace: dict[str, object]) -> None:
        """Execute a module's code whose functions do not exist yet."""
        exec(self.rewritten(code, {id(one): one for one in codes}, {}), namespace)

    def remove(self) -> None:
        while self._old:
            function, old, new = self._old.pop()
            if function.__code__ is new:  # else another watch has begun since, and stands on ours
                function.__code__ = old


def hooked(code: CodeType, hooks: Hooks) -> CodeType:
    constants: list[object] = list(code.co_consts)

    def load(value: object) -> int:
        constants.append(value)
        return len(constants) - 1

    enter, leave, raised = load(hooks.enter), load(hooks.leave), load(hooks.raised)
    suspend, resume, none = load(hooks.suspend), load(hooks.resume), load(None)
    body = take_apart(code)
    top = (OP["COPY"], 3)  # what is returned lies under the two that a call pushes
    for one in body:
        if one.op == OP["RESUME"]:
            me = _first_argument(code) if hooks.wants_self else (OP["LOAD_CONST"], none)
            one.after = call(resume) if one.arg & 3 else call(enter, me)
        elif one.op == OP["RETURN_VALUE"]:
            one.before = call(leave, top)
        elif one.op == OP["YIELD_VALUE"]:
            one.before = call(suspend, top)
    if hooks.line is not None:
        _add_lines(body, load(hooks.line), load)
    return put_together(code, body, tuple(constants), call(raised))


def _first_argument(code: CodeType) -> tuple[int, int]:
    inside = code.co_varnames[0] in code.co_cellvars  # a nested function uses it too
    return (OP["LOAD_DEREF"] if inside else OP["LOAD_FAST"], 0)


def _add_lines(body: list[Instruction], hook: int, load: Callable[[object], int]) -> None:
    last: int | None = None
    started = False
    for one in body:
        line = one.position[0]
        if started and line is not None and line != last and one.op != OP["PUSH_EXC_INFO"]:
            one.before = call(hook, (OP["LOAD_CONST"], load(line))) + one.before
            last = line
        started = started or (one.op == OP["RESUME"] and one.arg == 0)
