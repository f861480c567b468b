"""2 bits for each number, with four evenly spaced levels around 0, and one step for each block.

Small numbers are sent too large; error feedback corrects that later (its cost in steps: docs/measurements.md).
"""

from meshwright.compression.language import Fields, Node, Sent, largest, magnitude, pack, where


def encode(g: Node, *, block: int = 256) -> Sent:
    step = largest(magnitude(g), block) / 2
    positive, negative = where(g >= step, 3.0, 2.0), where(g >= -step, 1.0, 0.0)
    return {"code": pack(where(g >= 0, positive, negative), bits=2), "step": step}


def decode(m: Fields) -> Node:
    return (m["code"] - 1.5) * m["step"]
