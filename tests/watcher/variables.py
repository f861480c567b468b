"""Programs whose variables and attributes change in ways that are easily missed; without torch."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any


def values() -> object:
    second = 1
    first = 2
    first, second = 3, 4  # said in the order in which the variables stand in the frame, which is not this line's
    del first
    first, items = second, [1]
    items.append(2)
    alias = items
    alias.append(3)
    del second, items
    table: dict[str, Any] = {"x": 1}
    table["y"] = 2
    table["x"] = 5
    number: Any = 1.0
    number = 1
    number = True
    number = float("nan")
    number = int("1000")
    number = int("1000")  # another object, but the same
    number = 10**400
    number = "text" * 500
    for i in range(3):
        number = i
        alias[0] = i
    ring = deque([1], maxlen=2)
    ring.append(3)
    pair: Any = (1, 2)
    pair = (1, [2])
    nothing = None
    return first, table, number, ring, pair, nothing


def things() -> object:
    one: Any = object()
    one = object()
    one = None; one = object()  # fmt: skip  # noqa: E702 - not the one before, though it may lie where that was
    one = things
    one = int
    raw = bytearray(b"ab")
    raw[0] = 1
    some = {1}
    some.add(2)
    many = list(range(100))
    many[3] = 0
    return one, raw, some, many


def shared(x: int) -> int:
    total = 0

    def add() -> int:
        nonlocal total, x
        total += 1
        x = total
        return x

    add()
    last = add()
    del x
    x = 5
    add()
    return total + last + x


def released() -> bool:
    held: Any = Base()
    gone = weakref.ref(held)
    held = None
    return gone() is None


class Base:
    def __init__(self) -> None:
        self.a = 1


class Derived(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b: Any = [self.a]
        inner = self.b
        inner.append(1)

    def ways(self, n: int, *args: int, k: int = 2, **more: int) -> Any:
        if n:
            return n
        self.a = n
        try:
            self.fail(n)
        except ValueError as error:
            got = str(error)
        finally:
            self.b = None
        with contextlib.suppress(KeyError):
            self.c = more["no"]
        return got

    def store(self, n: int) -> None:
        """Without calls, so that only what is stored is looked at."""
        self.a = n + n
        self.a = n + n
        self.a = n + n + 0.0  # type: ignore[assignment]
        self.b = self.a
        self.b = [self.b]
        self.b = "text" * n
        self.b = 10**400

    def fail(self, n: int) -> None:
        self.a += 1
        n = 3
        raise ValueError(f"bad {n}")

    def again(self, n: int) -> int:
        x = n
        self.a = x
        if n:
            self.again(n - 1)
        x = -n
        return x + 1

    def each(self, n: int) -> Iterator[int]:
        for i in range(n):
            got = yield i
            self.a = got


class Long(list[int]):
    def __len__(self) -> int:
        raise RuntimeError("too long")


class Awkward:
    def work(self) -> int:
        n, found = 1, Long()
        n = 2
        self.x, self.found = n, found
        n = 3
        return n + 1


LIMIT = 1


def limits() -> None:
    global LIMIT
    LIMIT += 1


def all_of_it() -> None:
    global LIMIT
    LIMIT = 1
    values(), things(), shared(3), released(), limits(), limits()
    derived = Derived()
    derived.ways(1), derived.ways(0, 5, k=3, z=3)
    derived.store(500)
    derived.a = 55
    derived.again(3)
    with contextlib.suppress(ValueError):
        derived.fail(2)
    steps = derived.each(2)
    next(steps), steps.send(4)
    with contextlib.suppress(StopIteration):
        steps.send(5)
    Awkward().work()


def tensors(torch: Any) -> object:
    x = torch.zeros(2)
    y = x
    y.add_(1)
    y = x + 1
    y[0] = 3
    y = y.half()
    y.data = torch.zeros(4, dtype=torch.float16)
    y.data = y.data.view(2, 2)
    y.data = torch.ones(2, 2, dtype=torch.float16)
    held = [y]
    y.add_(2)
    w: Any = torch.eye(2).to_sparse()
    w = torch.nn.Parameter(torch.ones(1))
    with torch.inference_mode():
        v = torch.ones(2)
    for i in range(2):
        v = torch.ones(i)
    del v
    return held, w
