"""Reference implementation of algorithms in NumPy: one gradient at a time, slow and clear.

Other backends are compared with it in float64. In float32 it is the fallback without a compiler. Statistics of
gradients and blocks are float32 in both, as they are in messages.

>>> import numpy as np
>>> from meshwright.compression import codec
>>> onebit = codec("onebit").program
>>> message, left = encoded(onebit, np.array([1.0, -3.0]), residual=np.zeros(2))
>>> decoded(onebit, message, 2), left
(array([ 2., -2.]), array([-1., -1.]))
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.compression.language import REDUCTIONS, Node
from meshwright.compression.program import ROUNDS, RUN, SMALLEST, Field, Program, capacity, sampling

Array = NDArray[Any]


def encoded(
    program: Program,
    flat: Array,
    *,
    residual: Array | None = None,
    seed: int = 0,
    agreed: float | None = None,
    real: Any = np.float64,
) -> tuple[Array, Array | None]:
    """Return the message of one gradient, and its residual."""
    taken = Taken.of(flat, residual, real)
    count, places = len(flat), program.layout(len(flat))
    message = np.zeros(places[""], np.uint8)
    if not count:
        return message, residual
    values = Values(count, taken.numbers, program.block, seed=seed, agreed=agreed, real=real)
    last = program.encoding[-1]
    if last.choice is not None:
        part = next(one.part for one in program.fields if one.over == "chosen")
        if last.choice.op == "drawn":
            values.chosen = drawn(count, part, seed)  # including bad ones, which are 0
        else:
            values.chosen = np.flatnonzero(values.of(last.choice) & taken.good)[: capacity(count, part)]
    message[:8] = np.array([taken.bad, len(values.chosen)], np.uint32).view(np.uint8)
    for one in program.fields:
        if one.sent:
            stored = _stored(one, values.of(one.node))
            message[places[one.name] : places[one.name] + len(stored)] = stored
    if residual is None:
        return message, None
    assert last.result is not None
    return message, np.where(taken.good, taken.numbers - values.of(last.result), taken.kept)


def measured(program: Program, flat: Array, residual: Array | None = None, real: Any = np.float64) -> float:
    """Return the value of one gradient on which ranks must agree."""
    if program.agrees is None or not len(flat):
        return 0.0
    return float(Values(len(flat), Taken.of(flat, residual, real).numbers, program.block, real=real).of(program.agrees))


def decoded(
    program: Program, message: Array, count: int, *, agreed: float | None = None, real: Any = np.float64
) -> Array:
    """Return the numbers that one gradient's message stands for."""
    values = Values(count, np.zeros(0), program.block, agreed=agreed, real=real)
    places = program.layout(count)
    chosen = min(int(message[4:8].view(np.uint32)[0]), count)
    for one in program.fields:
        here = message[places[one.name] : places[one.name] + one.bytes(count)]
        if not one.sent:
            values.fields[one.name] = np.float32(agreed or 0).astype(real)
        else:
            read = _loaded(one, here, one.length(count), real)
            values.fields[one.name] = {"chosen": read[:chosen], "gradient": read[:1].sum()}.get(one.over, read)
    assert program.decoding.result is not None
    return np.broadcast_to(values.spread(values.of(program.decoding.result), program.decoding.result), count).astype(
        real
    )


@dataclass(frozen=True)
class Taken:
    """One gradient with its residual: good numbers as they are, 0 for bad ones (infinite or NaN)."""

    numbers: Array
    good: Array
    kept: Array  # residual of bad numbers: unchanged, or 0 if it was bad itself
    bad: bool  # True if a number of the gradient, the residual or their sum is bad

    @classmethod
    def of(cls, flat: Array, residual: Array | None, real: Any) -> Taken:
        with np.errstate(all="ignore"):
            before = np.zeros(len(flat), real) if residual is None else residual.astype(real)
            kept = np.where(_finite(before), before, 0)
            numbers, seen = flat.astype(real) + kept + 0.0, flat.astype(real) + before  # 0.0: avoids -0
            good = _finite(numbers)
            return cls(np.where(good, numbers, 0), good, kept, not _finite(seen).all())


def _finite(x: Array) -> Array:
    """Round to float32, the type of numbers everywhere else."""
    return np.isfinite(x.astype(np.float32))


@dataclass
class Values:
    """Values of one gradient, computed on demand."""

    count: int
    numbers: Array
    block: int
    seed: int = 0
    agreed: float | None = None
    real: Any = np.float64
    chosen: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    fields: dict[str, Any] = field(default_factory=dict)
    known: dict[int, Any] = field(default_factory=dict)

    def of(self, node: Node) -> Any:
        if id(node) not in self.known:
            with np.errstate(all="ignore"):
                value = self._computed(node)
            kind = {"float": self.real, "int": np.int32, "bool": np.bool_}[node.kind]
            if node.kind == "float" and node.over in {"gradient", "block"}:
                value = np.asarray(value, np.float32)  # as in every backend
            self.known[id(node)] = np.asarray(value).astype(kind)
        return self.known[id(node)]

    def spread(self, value: Any, node: Node) -> Any:
        """Expand a value per block to one per number."""
        return np.repeat(value, self.block)[: self.count] if node.over == "block" else value

    def _computed(self, node: Node) -> Any:
        if node.op in REDUCTIONS:
            return self._reduced(node)
        if hasattr(self, f"_{node.op}"):
            return getattr(self, f"_{node.op}")(node)
        args = [self.of(arg) for arg in node.args]
        if node.over == "number":
            args = [self.spread(value, arg) for value, arg in zip(args, node.args, strict=True)]
        if any(arg.kind == "float" for arg in node.args[node.op == "where" :]) or node.op == "div":
            args = [arg if i == 0 and node.op == "where" else arg.astype(self.real) for i, arg in enumerate(args)]
        elif node.op in {"add", "sub", "mul", "neg"}:
            args = [arg.astype(np.int32) for arg in args]
        return OPERATIONS[node.op](*args)

    def _reduced(self, node: Node) -> Any:
        value = np.broadcast_to(self.of(node.args[0]), self.count).astype(
            np.int64 if node.kind == "int" else np.float64
        )
        reduce = {"total": np.add, "largest": np.maximum, "smallest": np.minimum}[node.op]
        return reduce.reduceat(value, np.arange(0, self.count, node.block)) if node.block else reduce.reduce(value)

    def _gradient(self, node: Node) -> Any:
        return self.numbers

    def _constant(self, node: Node) -> Any:
        return np.float32(node.value)

    def _index(self, node: Node) -> Any:
        return np.arange(self.count)

    def _count(self, node: Node) -> Any:
        return self.count

    def _uniform(self, node: Node) -> Any:
        return uniform(self.count, self.seed)

    def _agreed(self, node: Node) -> Any:
        return self.of(node.args[0]) if self.agreed is None else self.agreed

    def _threshold(self, node: Node) -> Any:
        return found_threshold(self.of(node.args[0]), node.value, node.every)

    def _take(self, node: Node) -> Any:
        return np.broadcast_to(self.spread(self.of(node.args[1]), node.args[1]), self.count)[self.chosen]

    def _kept(self, node: Node) -> Any:
        return np.isin(np.arange(self.count), self.chosen)

    def _field(self, node: Node) -> Any:
        return self.fields[node.name]

    def _spread(self, node: Node) -> Any:
        index, value = (self.of(arg) for arg in node.args)
        out = np.zeros(self.count, self.real)
        inside = (index >= 0) & (index < self.count)  # a message may be damaged
        out[index[inside]] = np.broadcast_to(value, index.shape)[inside]
        return out


def hashed(count: int, seed: int) -> Array:
    """Return 32 random bits for every index, from it and the seed."""
    x = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(seed * 0x85EBCA77 & 0xFFFFFFFF)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    return np.asarray((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B), np.uint32)


def uniform(count: int, seed: int) -> Array:
    """Return numbers from [0, 1), with 23 bits of the hash."""
    return (hashed(count, seed) >> np.uint32(9)) * 2.0**-23


def drawn(count: int, part: float, seed: int) -> Array:
    """Return randomly chosen indices, one in every stratum.

    There are as many strata as there is room for; the first ones are longer by one if lengths differ.
    """
    many = capacity(count, part)
    if not many:
        return np.zeros(0, np.int64)
    wide, longer = divmod(count, many)
    which = np.arange(many)
    length = (wide + (which < longer)).astype(np.uint64)
    inside = (hashed(many, seed).astype(np.uint64) * length) >> np.uint64(32)
    return np.asarray(which * wide + np.minimum(which, longer) + inside.astype(np.int64))


def found_threshold(x: Array, part: float, every: int) -> Any:
    """Return the value that about `part` of the numbers reach; see `program.ROUNDS`."""
    step, count = sampling(len(x), every)
    seen = x[np.arange(len(x)) // RUN % step == 0].astype(np.float32)
    k = capacity(count, part)
    if np.count_nonzero(seen > 0) <= k:
        return np.float32(SMALLEST)
    low, high = np.float32(0), seen.max()
    for turn in range(ROUNDS):
        if turn:
            tries = low + (high - low) * (np.arange(1, 16, dtype=np.float32) / np.float32(16))
        else:
            tries = high * np.float32(2) ** np.arange(-15, 0, dtype=np.float32)
        many = [value for value in tries if np.count_nonzero(seen >= value) > k]
        few = [value for value in tries if np.count_nonzero(seen >= value) <= k]
        low, high = max(many, default=low), min(few, default=high)
    return high


def to_bfloat(x: Array) -> Array:
    """Round to the nearest numbers whose lower 16 bits are zero, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


OPERATIONS: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": lambda x, y: np.where(x < y, x, y),
    "max": lambda x, y: np.where(x > y, x, y),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "neg": np.negative,
    "abs": np.abs,
    "floor": np.floor,
    "round": np.rint,
    "sqrt": np.sqrt,
    "where": np.where,
    "float": lambda x: x,
    "int": np.trunc,
    "half": lambda x: x.astype(np.float32).astype(np.float16),
    "bfloat": to_bfloat,
}


def _stored(one: Field, value: Any) -> Array:
    """Return a field as bytes."""
    value = np.atleast_1d(value)
    if one.bits < 8:
        bits = (value.astype(np.uint8)[:, None] >> np.arange(one.bits, dtype=np.uint8)) & 1
        return np.packbits(bits.reshape(-1), bitorder="little")
    if one.dtype == "bf16":
        value = (value.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        value = value.astype(_numpy_type(one))
    return np.frombuffer(value.tobytes(), np.uint8)


def _loaded(one: Field, data: Array, length: int, real: Any) -> Array:
    """Return the values of a field."""
    if one.bits < 8:
        bits = np.unpackbits(data, count=length * one.bits, bitorder="little").reshape(length, one.bits)
        return np.asarray((bits << np.arange(one.bits, dtype=np.uint8)).sum(1), np.int32)
    if one.dtype == "bf16":
        return np.asarray((data.view(np.uint16).astype(np.uint32) << 16).view(np.float32), real)
    return np.asarray(data.view(_numpy_type(one)), real if "f" in one.dtype else np.int32)


def _numpy_type(one: Field) -> str:
    return one.dtype[0] + str(one.bits // 8)
