"""Check that all ranks of a group are present with equal settings, before any gradient waits for another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from meshwright.compression.sync.layout import Choice
from meshwright.compression.sync.transport.failure import PeerLost, default_store
from meshwright.errors import InputError

_POLL = 0.01  # seconds


def present(ranks: Sequence[int], limit: float) -> None:
    """Wait until all these ranks ask for the same; raises a `PeerLost` that names the missing ones."""
    store = dist.PrefixStore(f"compress/present/{'-'.join(map(str, ranks))}", default_store())
    try:
        time_ = store.add(f"of {dist.get_rank()}", 1)  # the first time that this rank asks, the second ...
        come = store.add(f"{time_}", 1)
        until = time.monotonic() + limit
        while come < len(ranks) and time.monotonic() < until:
            time.sleep(_POLL)
            come = store.add(f"{time_}", 0)
        if come < len(ranks):
            missing = [rank for rank in ranks if store.add(f"of {rank}", 0) < time_]
            who = ", ".join(f"rank {rank}" for rank in missing)
            raise PeerLost(f"{who}: did not come to synchronise gradients in {limit:g} s", peers=missing)
    except RuntimeError as error:  # from the store
        raise PeerLost(f"the store that joins the processes is gone: {str(error).splitlines()[0]}") from None


def alike(said: Sequence[str], ranks: Sequence[int], field: str) -> None:
    """Refuse settings that differ between ranks.

    >>> alike(["int8 gather", "int8 gather", "int4 gather"], [0, 1, 2], "choice")
    Traceback (most recent call last):
    ...
    meshwright.errors.InputError: choice: rank 0 has 'int8 gather', rank 2 'int4 gather' (valid: the same on all ranks)
    """
    for rank, one in zip(ranks, said, strict=True):
        if one != said[0]:
            problem = f"rank {ranks[0]} has '{said[0]}', rank {rank} '{one}'"
            raise InputError(problem, field=field, valid="the same on all ranks")


def described(choice: Any) -> str:
    """Return a text that is equal for equal choices; for a function only that it is one.

    >>> from meshwright.compression import codec
    >>> described(Choice(codec("topk", part=0.1), "ring")), described(Choice())
    ("topk {'part': 0.1} ring in pieces of 1048576", 'none')
    """
    if isinstance(choice, Choice):
        if choice.codec is None:
            return "none"
        return f"{choice.codec.name} {dict(choice.codec.options)} {choice.topology} in pieces of {choice.piece}"
    ways = getattr(choice, "ways", None)
    if ways is None:
        return "a function"
    each = "; ".join(f"{described(way.choice)} at {way.steps:g}" for way in ways)
    return f"Auto of {each}, guard {choice.guard}, every {choice.every}"
