"""The sign of each number, and the mean magnitude (Seide et al. 2014; Karimireddy et al. 2019)."""

from meshwright.compression.language import Fields, Node, Sent, magnitude, mean, pack, where


def encode(g: Node) -> Sent:
    return {"positive": pack(g >= 0, bits=1), "scale": mean(magnitude(g))}


def decode(m: Fields) -> Node:
    return where(m["positive"] > 0, m["scale"], -m["scale"])
