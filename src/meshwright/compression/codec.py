"""Codecs by name, with their options; the algorithms are the files of the folder `algorithms`."""

from __future__ import annotations

import inspect
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from meshwright.compression import algorithms
from meshwright.compression.program import Program, compiled
from meshwright.errors import InputError

if TYPE_CHECKING:
    import torch

    from meshwright.compression.batch import Batch


@dataclass(frozen=True, eq=False)
class Codec:
    """Algorithm with its options. A new one needs two functions and no registration.

    >>> from meshwright.compression.language import largest, magnitude, nearest, pack
    >>> def encode(g, *, levels=7):
    ...     top = largest(magnitude(g))
    ...     return {"code": pack(nearest(g / top * levels) + levels, bits=4), "top": top}
    >>> def decode(m, *, levels=7):
    ...     return (m["code"] - levels) * m["top"] / levels
    >>> Codec("mine", encode, decode).bytes([1000])  # a head, 4 bits each, the largest; 16 bytes at least for each
    544
    """

    name: str
    encode: Callable[..., Any]
    decode: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 1  # successive messages; batches need codecs with one round
    check: Callable[..., None] | None = None  # refuses bad options, all of which it gets as keywords

    def __post_init__(self) -> None:
        known = self.usual
        for option in self.options:
            if option not in known:
                valid = ", ".join(known) or "none: it has no options"
                raise InputError(f"unknown option '{option}'", field=self.name, valid=valid)

    @property
    def usual(self) -> dict[str, Any]:
        """Default options: keywords of the functions."""
        return _keywords(self.name, self.encode) | _keywords(self.name, self.decode)

    @cached_property
    def program(self) -> Program:
        """Both functions, traced."""
        given = dict(self.options)
        try:
            return compiled(
                *(
                    partial(one, **{k: v for k, v in given.items() if k in _keywords(self.name, one)})
                    for one in (self.encode, self.decode)
                )
            )
        except InputError as wrong:
            raise wrong.at(file=f"codec {self.name}") from None

    @property
    def summable(self) -> bool:
        """Return True if messages can be added, as numbers of the type `program.sums`, and decoded afterwards."""
        return bool(self.program.sums)

    def bytes(self, counts: Iterable[int]) -> int:
        """Return the message's length for gradients of these counts."""
        return sum(self.program.layout(count)[""] for count in counts)

    def batch(self, counts: Sequence[int], device: Any = "cpu", dtype: torch.dtype | None = None) -> Batch:
        """Return a batch for gradients of these sizes: C or NumPy on a CPU, Triton elsewhere."""
        import torch

        if torch.device(device).type not in ("cpu", "cuda"):
            raise InputError(f"is {device}", field="device", valid="cpu or cuda")
        arguments = (self.program, counts, torch.device(device), dtype or torch.float32)
        if torch.device(device).type == "cuda":
            # Imported here by name: Triton exists only with CUDA.
            made: Batch = import_module("meshwright.compression.backends.triton.batch").TritonBatch(*arguments)
            return made
        from meshwright.base.native import BuildError, compiler
        from meshwright.compression.backends.c.batch import NativeBatch
        from meshwright.compression.backends.numpy.batch import PortableBatch

        try:
            return NativeBatch(*arguments) if compiler() else PortableBatch(*arguments)
        except BuildError as error:
            warnings.warn(f"codec {self.name} runs in NumPy: {error}", stacklevel=2)
            return PortableBatch(*arguments)


def codecs() -> dict[str, Codec]:
    """Return every shipped algorithm by name, with its default options.

    >>> sorted(codecs())[:5]
    ['bf16', 'dgc', 'fp16', 'graddrop', 'homomorphic']
    """
    modules = (
        import_module(f"{algorithms.__name__}.{name}") for _, name, _ in pkgutil.iter_modules(algorithms.__path__)
    )
    return {codec.name: codec for codec in map(_shipped, modules)}


def codec(name: str, **options: Any) -> Codec:
    """Return a shipped algorithm with options that override its defaults.

    >>> codec("terngrad", bits=4).options
    {'bits': 4}
    >>> codec("terngrad", bit=4)
    Traceback (most recent call last):
    ...
    meshwright.errors.InputError: terngrad: unknown option 'bit' (valid: bits)
    """
    known = codecs()
    if name not in known:
        raise InputError(f"unknown codec '{name}'", field="codec", valid=", ".join(sorted(known)))
    found = known[name]
    made = replace(found, options={**found.options, **options})
    for option, value in options.items():
        _check_kind(name, option, value, found.options[option])
    if found.check is not None:
        try:
            found.check(**made.options)
        except InputError as wrong:
            raise InputError(wrong.problem, field=f"{name}.{wrong.field}", valid=wrong.valid) from None
    return made


def unusual(given: Codec) -> dict[str, Any]:
    """Return the options of a codec that differ from its defaults.

    >>> unusual(codec("powersgd", rank=8))
    {'rank': 8}
    """
    usual = given.usual
    return {name: value for name, value in given.options.items() if value != usual.get(name)}


def _shipped(module: Any) -> Codec:
    name = module.__name__.rpartition(".")[2]
    rounds, check = getattr(module, "ROUNDS", 1), getattr(module, "check", None)
    bare = Codec(name, module.encode, module.decode, rounds=rounds)
    return replace(bare, options=bare.usual, check=check)


def _keywords(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a function with their defaults."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    for one in parameters:
        if one.default is inspect.Parameter.empty:
            raise InputError(f"option '{one.name}' has no default", field=name, valid=f"{one.name}=...")
    return {one.name: one.default for one in parameters}


def _check_kind(name: str, option: str, value: Any, usual: Any) -> None:
    kinds = (int, float) if isinstance(usual, float) else (type(usual),)
    if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(usual, bool):
        raise InputError(f"is {value!r}", field=f"{name}.{option}", valid=f"such as {usual!r}")
