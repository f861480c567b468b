"""A few levels from the smallest number to the largest, with stochastic rounding (Wen et al. 2017)."""

from meshwright.compression.language import Fields, Node, Sent, floor, largest, pack, smallest, uniform, where
from meshwright.errors import InputError


def encode(g: Node, *, bits: int = 2) -> Sent:
    low = smallest(g)
    gap = (largest(g) - low) / (2**bits - 1)
    return {"code": pack(floor(where(gap > 0, (g - low) / gap, 0.0) + uniform()), bits), "low": low, "gap": gap}


def decode(m: Fields) -> Node:
    return m["low"] + m["code"] * m["gap"]


def check(*, bits: int) -> None:
    if bits not in (1, 2, 4, 8, 16):
        raise InputError(f"is {bits}", field="bits", valid="1, 2, 4, 8 or 16")
