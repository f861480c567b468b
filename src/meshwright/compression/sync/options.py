"""Options of a synchroniser beside the codec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from meshwright.compression.sync.layout import Choice
from meshwright.compression.sync.transport.agreement import described
from meshwright.errors import InputError

_LONGEST = 1e6  # seconds


@dataclass(frozen=True)
class Options:
    """Options of a synchroniser.

    >>> Options(momentum=1.5)
    Traceback (most recent call last):
    ...
    meshwright.errors.InputError: momentum: is 1.5 (valid: 0 or more, less than 1)
    """

    mean: bool = True  # mean over ranks; else the sum
    error_feedback: bool = True  # what a message loses is added to the next one
    momentum: float = 0.0  # of momentum correction (DGC), accumulated before encoding; the optimizer then has none
    warm_up: tuple[tuple[int, Choice], ...] = ()  # (step until which it holds, choice), in order
    # Ranks of a node: a process group, or a number of adjacent ranks. If more than one, gradients are summed
    # uncompressed inside nodes, and compressed between ranks of equal index in their nodes.
    node: Any = 1
    limit: float = 60.0  # seconds that a wait may take

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise InputError(f"is {self.momentum}", field="momentum", valid="0 or more, less than 1")
        if self.momentum and not self.error_feedback:
            raise InputError("needs error feedback", field="momentum", valid="error_feedback=True")
        if not isinstance(self.limit, int | float) or not 0 < self.limit < _LONGEST:
            raise InputError(f"is {self.limit!r}", field="limit", valid=f"seconds, more than 0, less than {_LONGEST:g}")
        if isinstance(self.node, float | str) or (isinstance(self.node, int) and self.node < 1):
            raise InputError(f"is {self.node!r}", field="node", valid="1 or more processes, or a process group")
        if not isinstance(self.warm_up, tuple | list) or not all(map(_until, self.warm_up)):
            raise InputError(f"is {self.warm_up!r}", field="warm_up", valid="((until which step, Choice(...)), ...)")
        ends = [until for until, _ in self.warm_up]
        if ends != sorted(ends):
            raise InputError(f"ends at {ends}", field="warm_up", valid="steps in rising order")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Create options from keywords.

        >>> Options.of({"lmit": 3})
        Traceback (most recent call last):
        ...
        meshwright.errors.InputError: lmit: unknown option (valid: mean, error_feedback, momentum, warm_up, node, limit)
        """
        known = [one.name for one in fields(cls)]
        for name in given:
            if name not in known:
                raise InputError("unknown option", field=name, valid=", ".join(known))
        return cls(**given)

    def told(self) -> str:
        """Return the options that must be the same on all ranks, as text."""
        warm_up = [(until, described(choice)) for until, choice in self.warm_up]
        return f"mean {self.mean}, error_feedback {self.error_feedback}, momentum {self.momentum}, warm_up {warm_up}"


def _until(one: Any) -> bool:
    return isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], int) and isinstance(one[1], Choice)
