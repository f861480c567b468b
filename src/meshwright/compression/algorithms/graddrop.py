"""Gradient dropping (Aji and Heafield 2017): drop the smallest magnitudes, send the others in half precision."""

from meshwright.compression.language import (
    Fields,
    Node,
    Sent,
    choose,
    half,
    larger,
    magnitude,
    smaller,
    spread,
    threshold,
)


def encode(g: Node, *, dropped: float = 0.99) -> Sent:
    part = 1 - dropped
    chosen = choose(magnitude(g) >= threshold(magnitude(g), part, every=1024), part)
    return {"index": chosen.index, "value": chosen.take(half(smaller(larger(g, -65504.0), 65504.0)))}


def decode(m: Fields) -> Node:
    return spread(m["index"], m["value"])
