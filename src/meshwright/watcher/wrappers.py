"""Wrappers, which add texts to events.

A wrapper is any class with some of three methods; each returns a text, "" for nothing:

    class Shapes:
        def call(self, name, frame): return str(frame.f_locals["x"].shape)
        def returned(self, name, value): return str(value.shape)
        def changed(self, old, new): return ""

`old` is the value itself if it is a number or text, else a text of it: keeping the object would keep its memory.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from meshwright.base.units import size
from meshwright.errors import InputError, UnknownName, shorten
from meshwright.watcher.values.describe import describe, is_tensor, tensor_text


class Plain:
    """Wrapper that shows arguments and returned values."""

    def call(self, name: str, frame: FrameType) -> str:
        show = self.show
        return ", ".join([f"{key}={show(value)}" for key, value in arguments(frame).items()])

    def returned(self, name: str, value: object) -> str:
        return f"-> {self.show(value)}"

    def changed(self, old: object, new: object) -> str:
        return ""

    show: Callable[[object], str] = staticmethod(describe)


class Tensor(Plain):
    """Wrapper that shows tensors: shape, type, device, placement, and the least, greatest and norm of their numbers.

    The numbers are computed on the tensor's device and waited for. This is slow on accelerators, and only done on
    request.
    """

    def show(self, value: object) -> str:
        if isinstance(value, list | tuple) and any(map(is_tensor, value)):
            return f"({', '.join(map(self.show, value[:8]))}{', ...' * (len(value) > 8)})"
        return f"{tensor_text(value)} {numbers(value)}".rstrip() if is_tensor(value) else describe(value)

    def changed(self, old: object, new: object) -> str:
        return numbers(new) if is_tensor(new) else ""


class Memory:
    """Wrapper that shows memory before a call and what it added: of the device if one is in use, else of the process."""

    def __init__(self) -> None:
        self._local = threading.local()

    def call(self, name: str, frame: FrameType) -> str:
        now = held()
        self._calls().append((name, now))
        return size(now)

    def returned(self, name: str, value: object) -> str:
        now, calls = held(), self._calls()
        while calls and calls[-1][0] != name:
            calls.pop()  # an exception has left it
        more = now - (calls.pop()[1] if calls else now)
        return f"{size(now)} ({'-' if more < 0 else '+'}{size(abs(more))})"

    def _calls(self) -> list[tuple[str, int]]:
        return self._local.__dict__.setdefault("calls", [])  # type: ignore[no-any-return]


WRAPPERS: dict[str, type[Any]] = {"plain": Plain, "tensor": Tensor, "memory": Memory}


class Said:
    """Wrapper as the hooks call it: methods may be missing, and its errors do not reach the program."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self.plain = type(wrapper) is Plain  # then C may produce the same text
        self.call = self._safe("call")  # (name, frame)
        self.returned = self._safe("returned")  # (name, value)
        self.changed = self._safe("changed")  # (old value, new value)

    def __bool__(self) -> bool:
        return self._wrapper is not None

    def _safe(self, what: str) -> Callable[[Any, Any], str]:
        method, kind = getattr(self._wrapper, what, None), type(self._wrapper).__name__
        if method is None:
            return lambda *_: ""

        def asked(first: Any, second: Any) -> str:
            try:
                return str(method(first, second) or "")
            except (Exception, SystemExit) as error:
                return shorten(f"({kind}.{what} raises {type(error).__name__}: {error})", 200)

        return asked


def wrapper_named(asked: Any) -> Said:
    """Return the wrapper for None, a name, 'module:Class', a class or an object with the methods."""
    if isinstance(asked, str):
        module, _, name = asked.partition(":")
        if not name and asked not in WRAPPERS:
            raise UnknownName("wrapper", asked, WRAPPERS, see=f"{', '.join(WRAPPERS)}, or module:Class").at(
                field="wrapper"
            )
        try:
            asked = getattr(importlib.import_module(module), name) if name else WRAPPERS[asked]
        except (ImportError, AttributeError) as error:
            raise InputError(f"'{module}:{name}' cannot be had: {error}", field="wrapper") from None
    if isinstance(asked, type):
        asked = _made(asked)
    if asked is not None and not any(callable(getattr(asked, one, None)) for one in ("call", "returned", "changed")):
        kind = type(asked).__name__
        raise InputError(f"{kind} has none of the methods call, returned, changed", field="wrapper")
    return Said(asked)


def _made(kind: type[Any]) -> Any:
    try:
        return kind()
    except Exception as error:
        problem = shorten(f"{kind.__name__}() raises {type(error).__name__}: {error}", 200)
        valid = "a class that is made without arguments; from Python also an object that is made already"
        raise InputError(problem, field="wrapper", valid=valid) from None


def arguments(frame: FrameType) -> dict[str, object]:
    held_by = frame.f_locals
    return {name: held_by[name] for name in argument_names(frame.f_code) if name in held_by}


def argument_names(code: CodeType) -> tuple[str, ...]:
    flags = code.co_flags
    count = code.co_argcount + code.co_kwonlyargcount + (flags >> 2 & 1) + (flags >> 3 & 1)  # *args, **kwargs
    return tuple(name for name in code.co_varnames[:count] if name != "self")


def numbers(value: Any) -> str:
    """Return least, greatest and norm; "" if there are no numbers to look at."""
    torch = sys.modules["torch"]
    local = value.to_local() if hasattr(value, "to_local") else value
    if (
        not local.numel()
        or local.is_meta
        or local.is_complex()
        or local.layout is not torch.strided
        or type(local).__name__ == "FakeTensor"
    ):
        return ""
    with torch.no_grad():
        flat = local.detach().float()
        return f"min {flat.min():.4g} max {flat.max():.4g} norm {flat.norm():.4g}"


def held() -> int:
    """Return bytes allocated on the device in use, else resident bytes of the process."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_available() and cuda.is_initialized():
        return int(cuda.memory_allocated())
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: the peak so far
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
