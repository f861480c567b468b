"""Integers on a scale shared by all ranks, so small that their sum fits: messages are added without decoding."""

from meshwright.compression import language as la
from meshwright.errors import InputError


def encode(g: la.Node, *, bits: int = 8, members: int = 4) -> la.Sent:
    levels = _levels(bits, members)
    scale = la.agreed(la.largest(la.magnitude(g)))
    code = la.floor(la.where(scale > 0, g / scale * levels, 0.0) + la.uniform())
    return {"code": la.pack(la.smaller(code, levels), bits, signed=True), "scale": scale}


def decode(m: la.Fields, *, bits: int = 8, members: int = 4) -> la.Node:
    return m["code"] * (m["scale"] / _levels(bits, members))


def _levels(bits: int, members: int) -> int:
    if not 0 < members < 2 ** (bits - 1):
        raise InputError(f"is {members}", field="members", valid=f"1 to {2 ** (bits - 1) - 1} for {bits} bits")
    return int(2 ** (bits - 1) - 1) // members
