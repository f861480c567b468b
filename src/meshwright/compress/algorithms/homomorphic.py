"""Whole numbers on a scale that all processes share, so small that their sum fits: messages are added, not decoded."""

from meshwright.compress.language import Fields, Node, Sent, agreed, floor, largest, magnitude, pack, uniform, where


def encode(g: Node, *, bits: int = 8, members: int = 4) -> Sent:
    levels = (2 ** (bits - 1) - 1) // members
    scale = agreed(largest(magnitude(g)))
    return {
        "code": pack(floor(where(scale > 0, g / scale * levels, 0.0) + uniform()), bits, signed=True),
        "scale": scale,
    }


def decode(m: Fields, *, bits: int = 8, members: int = 4) -> Node:
    levels = (2 ** (bits - 1) - 1) // members
    return m["code"] * m["scale"] / levels
