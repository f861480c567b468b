"""Randomly chosen numbers: different ones in every step, by its seed."""

from meshwright.compression.language import Fields, Node, Sent, draw, spread


def encode(g: Node, *, part: float = 0.01) -> Sent:
    chosen = draw(part)
    return {"index": chosen.index, "value": chosen.take(g)}


def decode(m: Fields) -> Node:
    return spread(m["index"], m["value"])
