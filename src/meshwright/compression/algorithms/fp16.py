"""Half precision; numbers beyond its range are sent as its largest, and the rest stays in the residual."""

from meshwright.compression.language import Fields, Node, Sent, half, larger, smaller


def encode(g: Node) -> Sent:
    return {"number": half(smaller(larger(g, -65504.0), 65504.0))}


def decode(m: Fields) -> Node:
    return m["number"]
