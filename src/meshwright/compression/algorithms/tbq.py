"""Threshold binary quantisation (Strom 2015): numbers beyond a threshold are sent as plus or minus the threshold."""

from meshwright.compression.language import Fields, Node, Sent, magnitude, mean, pack, where


def encode(g: Node, *, times: float = 2.0) -> Sent:
    tau = mean(magnitude(g)) * times
    return {"code": pack(where(magnitude(g) > tau, where(g > 0, 2, 0), 1), bits=2), "tau": tau}


def decode(m: Fields) -> Node:
    return (m["code"] - 1) * m["tau"]
