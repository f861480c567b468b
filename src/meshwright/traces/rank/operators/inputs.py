"""Inputs of an operator as the profiler recorded them, and their cost."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod
from typing import Any

# Bytes of an element, and the catalogue's name of the precision of products in it.
TYPES = {
    "double": (8, "fp64"), "float": (4, "fp32"), "c10::Half": (2, "fp16"), "c10::BFloat16": (2, "bf16"),
    "c10::Float8_e4m3fn": (1, "fp8"), "c10::Float8_e5m2": (1, "fp8"), "c10::Float8_e4m3fnuz": (1, "fp8"),
    "c10::Float8_e5m2fnuz": (1, "fp8"), "c10::Float4_e2m1fn_x2": (1, "fp4"),
    "long int": (8, ""), "long": (8, ""), "int": (4, ""), "short int": (2, ""), "short": (2, ""),
    "unsigned char": (1, ""), "signed char": (1, ""), "bool": (1, ""), "c10::complex<float>": (8, ""),
}  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """Cost of one call of an operator."""

    flops: int
    bytes: int
    precision: str  # the catalogue's name; "" if it has none


class Call:
    """Inputs of an operator: `shapes[i]` is None for no tensor, a list of shapes for a list of tensors."""

    def __init__(self, dims: str, types: str, concrete: str) -> None:
        self.shapes: list[Any] = json.loads(dims)
        self.types: list[str] = json.loads(types)
        self.concrete: list[str] = json.loads(concrete) if concrete else []

    def shape(self, place: int) -> list[int]:
        """Return the shape of a tensor, which must exist with a known type."""
        found = self.shapes[place]
        if self.types[place] not in TYPES or not all(isinstance(size, int) for size in found):
            raise KeyError(place)
        return list(found)

    def tensors(self) -> list[int]:
        """Return the indices of inputs that are tensors, without host scalars."""
        return [place for place, kind in enumerate(self.types) if kind in TYPES and place < len(self.shapes)]

    def width(self, place: int) -> int:
        return TYPES[self.types[place]][0]

    def bytes(self, *places: int) -> int:
        """Return the bytes of some tensor inputs; absent ones count as zero."""
        there = [place for place in places if place < len(self.types) and self.types[place] in TYPES]
        return sum(prod(self.shapes[place]) * self.width(place) for place in there)

    def flag(self, place: int) -> bool:
        return place < len(self.concrete) and self.concrete[place] == "True"

    def numbers(self, place: int) -> list[int]:
        """Return a list of numbers, which must exist."""
        return [int(word) for word in re.findall(r"-?\d+", self.concrete[place])]

    def cost(self, flops: int, moved: int, place: int = 0) -> Cost:
        return Cost(flops, moved, TYPES[self.types[place]][1])
