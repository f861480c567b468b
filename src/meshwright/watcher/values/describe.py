"""Describe values in a few words that are equal in every process, so that ranks can be compared: no addresses."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import deque
from collections.abc import Iterable
from itertools import islice
from types import MethodType
from typing import Any

SAMPLE = 64  # bytes of a tensor to compare
_LONGEST = 96  # characters of a value in an event
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(...)})
_SMALL = 256  # bits of a number with a short text
_NUMBERS = frozenset({bool, float, type(None)})
ORDINARY = frozenset({"Tensor", "Parameter"})  # tensors whose memory can be read, and whose shape is of numbers
_TENSORS = set[type]()  # types of ordinary tensors seen so far: checked first, since most values are one
_CONTAINERS = frozenset({list, tuple, dict, set, frozenset, deque})


def describe(value: Any, *, brief: bool = False) -> str:
    """Describe a value in a few words; `brief` leaves out the contents of containers.

    >>> describe([1, 2]), describe({"a": 1}, brief=True), describe(object())
    ('[1, 2]', 'dict of 1', '<object>')
    """
    kind = type(value)
    if kind in _TENSORS:
        return tensor_text(value)
    if kind in _NUMBERS or (kind is int and value.bit_length() < _SMALL):
        return repr(value)
    if kind in PLAIN:
        return shorten(_text(value))
    if is_tensor(value):
        return tensor_text(value)
    if kind in _CONTAINERS:
        items = first_of(value, 9)
        few = len(items) < 9 and all(type(one) in PLAIN for one in items)
        if few and not brief and kind is dict:
            few = all(type(one) in PLAIN for one in first_of(value.values(), 9))
        return shorten(repr(value)) if few and not brief else f"{kind.__name__} of {len(value)}"
    if is_array(value):
        return f"ndarray{list(value.shape)} {value.dtype}"
    return thing_text(value)


def thing_text(value: Any) -> str:
    """Return the name of a function or class, else of its type, without calling a `__getattr__` of the program.

    >>> thing_text(print), thing_text(dict), thing_text(object())
    ('<print>', '<dict>', '<object>')
    """
    kind: Any = type(value)
    if _has_name(kind):
        return f"<{getattr(value, '__qualname__', kind.__name__)}>"
    try:
        held = object.__getattribute__(value, "__dict__")
        name = held.get("__qualname__", kind.__name__) if callable(value) else kind.__name__
    except Exception:  # it has none, or a property of the program raises
        name = kind.__name__
    return f"<{name}>"


@functools.lru_cache(maxsize=1024)
def _has_name(kind: Any) -> bool:
    """Return True if objects of this type can be called, and each has a name of its own."""
    names = {name for one in kind.__mro__ for name in ("__call__", "__qualname__") if name in vars(one)}
    return len(names) == 2 or kind is MethodType


def _text(value: Any) -> str:
    if type(value) in (str, bytes):
        return repr(value[:_LONGEST])
    try:
        return repr(value)
    except ValueError:  # more digits than Python converts to text
        return f"int of {value.bit_length()} bits"


def shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def first_of(items: Iterable[Any], count: int, tries: int = 8) -> list[Any]:
    """Return the first items at one moment: another thread may be changing their container."""
    try:
        return list(islice(items, count))
    except RuntimeError:  # its size changed meanwhile
        if tries == 1:
            raise
        return first_of(items, count, tries - 1)


def is_tensor(value: object) -> bool:
    """Return True for a tensor, by its type: `isinstance` would evaluate a property `__class__` of the program."""
    torch = sys.modules.get("torch")  # a value is a tensor only if torch has been imported
    kind = getattr(torch, "Tensor", None)
    if kind is None or not issubclass(type(value), kind):
        return False
    if type(value).__name__ in ORDINARY:
        _TENSORS.add(type(value))
    return True


def is_array(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    kind = getattr(numpy, "ndarray", None)
    return kind is not None and issubclass(type(value), kind)


def tensor_text(value: Any) -> str:
    try:
        return f"{_layout(value)} v{version(value)}"
    except Exception as error:
        return f"{undescribed(type(value).__name__, error)} v{version(value)}"


def undescribed(kind: str, error: Exception) -> str:
    """Describe a tensor without a known shape, such as nested ones and parameters without a size."""
    return f"<{kind} not described: {type(error).__name__}>"


def _layout(value: Any) -> str:
    kind = type(value).__name__
    if kind in ORDINARY:
        return layout_text(kind, value.shape, value.dtype, value.device)
    placed = getattr(value, "placements", None)
    where = f" {', '.join(map(str, placed))}" if placed is not None else ""
    return f"{kind}{list(value.shape)} {_kind_text(value.dtype, value.device)}{where}"


@functools.lru_cache(maxsize=1024)
def layout_text(kind: str, shape: tuple[int, ...], dtype: object, device: object) -> str:
    return f"{kind}{list(shape)} {_kind_text(dtype, device)}"


@functools.lru_cache(maxsize=256)
def _kind_text(dtype: object, device: object) -> str:
    return f"{str(dtype).removeprefix('torch.')} {device}"


def first_bytes(value: Any) -> bytes:
    """Return an ordinary tensor's first bytes: collectives, fused optimizers and `.data` changes count no version.

    Return nothing for a tensor on a device, or not contiguous: it may hold less than its shape says.
    """
    try:
        if type(value).__name__ in ORDINARY and value.is_cpu and value.is_contiguous():
            return ctypes.string_at(value.data_ptr(), min(value.nbytes, SAMPLE)) if value.data_ptr() else b""
    except Exception:  # it has no memory
        pass
    return b""


def version(value: Any) -> int:
    """Return how often a tensor was changed in place."""
    try:
        return value._version  # type: ignore[no-any-return]
    except Exception:  # inference tensors have no version
        return -1
