"""Low rank (Vogels et al. 2019): matrix products and two rounds of messages, implemented by `lowrank.LowRank`.

`factors` is the codec of the thin matrices, "" for float32.
"""

from typing import NoReturn

from meshwright.compression.language import Fields, Node
from meshwright.errors import InputError

ROUNDS = 2


def encode(g: Node, *, rank: int = 4, factors: str = "int8") -> NoReturn:
    raise InputError("has two rounds", field="powersgd", valid="meshwright.compression.powersgd.low_rank.LowRank")


def decode(m: Fields) -> NoReturn:
    raise InputError("has two rounds", field="powersgd", valid="meshwright.compression.powersgd.low_rank.LowRank")


def check(*, rank: int, factors: str) -> None:
    from meshwright.compression.codec import codecs

    if rank < 1:
        raise InputError(f"is {rank}", field="rank", valid="1 or more")
    valid = [name for name, one in codecs().items() if one.rounds == 1] if factors else [""]
    if factors not in valid:
        raise InputError(f"is '{factors}'", field="factors", valid=f"'' or {', '.join(valid)}")
