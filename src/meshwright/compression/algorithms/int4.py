"""4 bits for each number, and one scale for each block."""

from meshwright.compression.language import Fields, Node, Sent, largest, magnitude, nearest, pack, where

LEVELS = 7


def encode(g: Node, *, block: int = 256) -> Sent:
    step = largest(magnitude(g), block) / LEVELS
    return {"code": pack(nearest(where(step > 0, g / step, 0.0)) + LEVELS, bits=4), "step": step}


def decode(m: Fields) -> Node:
    return (m["code"] - LEVELS) * m["step"]
