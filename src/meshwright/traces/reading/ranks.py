"""Find the rank that wrote a trace."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

NAMED = re.compile(r"(?:rank|worker)[-_.=]?(\d+)", re.I)
# A number right before the ending. PyTorch's own names end in a time of 13 digits or more, which is no rank.
LAST = re.compile(r"(?:^|[-_.])(\d{1,6})(?:\.pt)?(?:\.trace)?\.json(?:\.gz|\.zst)?$", re.I)
PARTS = re.compile(
    r"(?<![A-Za-z])(?:TP|PP|DP|EP|CP)[-_]?\d+", re.I
)  # the index in a group: a rank only if no other is recorded


def rank_of(header: dict[str, Any], name: str) -> tuple[int | None, str]:
    """Return a trace's rank and its source: its `distributedInfo`, or the name of the file.

    >>> rank_of({"distributedInfo": {"rank": 3}}, "trace.json")
    (3, 'distributedInfo')
    >>> rank_of({}, "worker7_step_12.1694128201553.pt.trace.json.gz"), rank_of({}, "run-12.json")
    ((7, 'file name'), (12, 'file name'))
    >>> rank_of({}, "node1_4242.1694128201553.pt.trace.json")
    (None, '')
    """
    told = header.get("distributedInfo")
    rank = told.get("rank") if isinstance(told, dict) else None
    if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0:
        return rank, "distributedInfo"
    name = PurePath(name).name
    if found := NAMED.search(name):
        return int(found[1]), "file name"
    if (found := LAST.search(name)) and len(PARTS.findall(name)) < 2:
        return int(found[1]), "file name"
    return None, ""
