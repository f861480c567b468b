"""Programs that the tests watch."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

LIMIT = 3


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start
        self.items: list[int] = []

    def add(self, step: int) -> int:
        self.count += step
        return self.count

    def last(self) -> None:
        self.count = 100

    def nothing(self) -> int:
        return self.count

    def keep(self, item: int) -> None:
        self.items.append(item)

    def replace(self, item: int) -> None:
        self.items[0] = item

    def remove(self) -> None:
        del self.count

    def fail(self) -> None:
        self.count = -1
        raise ValueError("count is bad")

    def saved(self) -> str:
        try:
            self.fail()
        except ValueError:
            return "saved"
        return "never"

    def outer(self) -> None:
        self.last()
        self.count = 7

    def each(self, n: int) -> Iterator[int]:
        yield from range(n)
        self.count = 55

    @property
    def double(self) -> int:
        return 2 * self.count

    @classmethod
    def make(cls) -> Counter:
        return cls(1)

    @staticmethod
    def twice(x: int) -> int:
        return 2 * x


class Child(Counter):
    def add(self, step: int) -> int:
        return super().add(10 * step)


class Table:
    def __init__(self) -> None:
        self.rows = {"a": 1, "b": 2}

    def change(self) -> None:
        self.rows["a"] = 10

    def rename(self) -> None:
        del self.rows["b"]
        self.rows["c"] = 3


class Slotted:
    __slots__ = ("__hidden", "x", "y")

    def __init__(self) -> None:
        self.x = 1
        self.__hidden = 2

    def grow(self) -> None:
        self.y = 5
        self.x = 2

    def shrink(self) -> None:
        del self.y


class Renamed:
    """Its methods call their object something else."""

    def __init__(this) -> None:  # noqa: N805
        this.n = 0

    def add(this, k: int) -> None:  # noqa: N805
        this.n += k

    @staticmethod
    def change(other: Renamed) -> None:
        other.n = -1


class Sides:
    """Changes in ways that are easily missed."""

    def __init__(self) -> None:
        self.x, self.items = 0, list(range(200))

    def by_alias(self) -> None:
        me = self
        me.x = 1
        self.items = list(self.items)

    def by_alias_in_place(self) -> None:
        items = self.items
        items += [7]

    def in_a_condition(self) -> int:
        if self.bump() > 100:
            return 0
        return self.x

    def bump(self) -> int:
        vars(self)["x"] += 1
        return self.x

    def caught(self) -> None:
        try:
            raise_after(self)
        except ValueError:
            self.items = []

    def in_a_loop(self) -> None:
        for self.x in range(3):
            pass


def raise_after(thing: Sides) -> None:
    thing.x = 5
    raise ValueError


def factorial(n: int) -> int:
    return 1 if n < 2 else n * factorial(n - 1)


def loud(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:  # without functools.wraps
        return function(*args)

    return wrapper


def polite(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@loud
def shouted(x: int) -> int:
    return x + 1


@polite
def asked(x: int) -> int:
    return x + 2


@functools.lru_cache
def remembered(x: int) -> int:
    return x + 3


def outside(x: int) -> Callable[[int], int]:
    def inside(y: int) -> int:
        return x + y

    return inside


ADDER = outside(10)


def numbers() -> Iterator[int]:
    yield 1
    yield 2


def echo() -> Iterator[str]:
    got = ""
    while True:
        try:
            got = yield f"heard {got}"
        except KeyError as error:
            got = f"error {error}"


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    try:
        yield
    finally:
        factorial(1)


async def wait(x: int) -> int:
    await asyncio.sleep(0)
    return x


async def gather() -> list[int]:
    return list(await asyncio.gather(wait(1), wait(2)))


def local_changes(n: int) -> int:
    total = 0
    for i in range(n):
        total += i
    return total


def set_limit(n: int) -> None:
    global LIMIT
    LIMIT = n


def in_threads(n: int) -> None:
    threads = [threading.Thread(target=factorial, args=(2,), name=f"worker-{i}") for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def refuse(why: str) -> None:
    raise ValueError(why)


class Loud:
    """Its repr is watched too, and must not be followed into."""

    def __repr__(self) -> str:
        return f"Loud({factorial(3)})"


def takes(thing: object) -> object:
    return thing
