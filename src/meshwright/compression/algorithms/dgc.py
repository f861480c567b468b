"""Deep gradient compression (Lin et al. 2018): about the largest numbers, by a threshold estimated from a sample.

The threshold aims slightly below the room in the message; numbers that find no room stay in the residual.
"""

from meshwright.compression.language import Fields, Node, Sent, choose, magnitude, spread, threshold


def encode(g: Node, *, part: float = 0.01, every: int = 1024) -> Sent:
    chosen = choose(magnitude(g) >= threshold(magnitude(g), part * 0.9, every), part)
    return {"index": chosen.index, "value": chosen.take(g)}


def decode(m: Fields) -> Node:
    return spread(m["index"], m["value"])
