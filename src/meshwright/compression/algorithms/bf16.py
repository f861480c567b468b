"""The upper half of single precision; numbers that would be rounded to infinity are sent as the largest finite one."""

from meshwright.compression.language import Fields, Node, Sent, half, larger, smaller

LARGEST = 2.0**127 * (2 - 2**-7)


def encode(g: Node) -> Sent:
    return {"number": half(smaller(larger(g, -LARGEST), LARGEST), bfloat=True)}


def decode(m: Fields) -> Node:
    return m["number"]
