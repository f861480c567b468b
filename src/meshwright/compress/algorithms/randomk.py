"""Numbers chosen at random: others in every step, by its seed."""

from meshwright.compress.language import Fields, Node, Sent, choose, spread, threshold, uniform


def encode(g: Node, *, part: float = 0.01) -> Sent:
    chosen = choose(uniform() >= threshold(uniform(), part, every=1024), part)
    return {"index": chosen.index, "value": chosen.take(g)}


def decode(m: Fields) -> Node:
    return spread(m["index"], m["value"])
