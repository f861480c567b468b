"""Parse a plan's rule of compression to a codec with its options, and a topology, without torch."""

from __future__ import annotations

from typing import Any

from meshwright.compression.codec import Codec, codec, codecs
from meshwright.compression.topologies import TOPOLOGIES
from meshwright.errors import InputError
from meshwright.plans import Compression


def asked(rule: Compression, members: int = 1) -> tuple[Codec, str]:
    """Codec and topology; a rule's options are the codec's, and `topology`. `members`: processes that sum gradients.

    >>> found, topology = asked(Compression(layers="head", algorithm="int8", options={"block": 64, "topology": "ring"}))
    >>> found.options, topology
    ({'block': 64}, 'ring')
    >>> asked(Compression(layers="head", algorithm="int8", options={"blocks": 64}))
    Traceback (most recent call last):
    ...
    meshwright.errors.InputError: options.int8: unknown option 'blocks' (valid: block)
    """
    known = codecs()
    if rule.algorithm not in known:
        raise InputError(f"unknown codec '{rule.algorithm}'", field="algorithm", valid=", ".join(sorted(known)))
    usual = known[rule.algorithm].options
    # A document's numbers are floats; a codec's whole numbers are not.
    given: dict[str, Any] = {
        name: int(value)
        if isinstance(usual.get(name), int) and isinstance(value, float) and value.is_integer()
        else value
        for name, value in rule.options.items()
        if name != "topology"
    }
    if "members" in usual:  # how many messages a sum has room for
        given.setdefault("members", members)
    # By default the one in which each process sends as many bytes as in an all-reduce, times what the codec leaves of them.
    topology = str(rule.options.get("topology", "scatter"))
    if topology not in TOPOLOGIES:
        raise InputError(f"is '{topology}'", field="options.topology", valid=", ".join(TOPOLOGIES))
    try:
        found = codec(rule.algorithm, **given)
        if found.rounds == 1:
            _ = found.program  # traced here: what the algorithm itself refuses is said now
    except InputError as error:
        raise InputError(error.problem, field=f"options.{error.field}", valid=error.valid) from None
    return found, topology
