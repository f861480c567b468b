"""The numbers of the largest magnitudes, with their indices."""

from meshwright.compression.language import Fields, Node, Sent, choose, magnitude, spread, threshold


def encode(g: Node, *, part: float = 0.01) -> Sent:
    chosen = choose(magnitude(g) >= threshold(magnitude(g), part), part)
    return {"index": chosen.index, "value": chosen.take(g)}


def decode(m: Fields) -> Node:
    return spread(m["index"], m["value"])
