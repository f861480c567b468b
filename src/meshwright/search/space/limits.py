"""Limits of a search: what the user fixes, and what the user forbids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import InputError, UnknownName
from meshwright.plans import parse_short
from meshwright.plans.schedule import V_SHAPED

# Names of a fixed value, with the smallest it may be; strings are checked on use.
_NUMBERS = {
    "tp": 1, "ulysses": 1, "ring": 1, "ep": 1, "etp": 1, "dp": 1, "pp": 1, "virtual": 1, "micro_batch": 1,
    "micro_batches": 1, "zero": 0, "zero_group": 0, "devices": 1,
}  # fmt: skip
_WORDS = {
    "schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"),
    "recompute": ("none", "selective", "full"),
    "sp": ("true", "false"),
}
# Names that can be forbidden, and their meaning.
FORBIDDABLE = {
    "tp": "tensor parallelism", "sp": "sequence parallelism", "ulysses": "Ulysses", "ring": "ring attention",
    "ep": "expert parallelism", "pp": "pipelines", "zero": "ZeRO of any level", "zero1": "ZeRO-1", "zero2": "ZeRO-2",
    "zero3": "ZeRO-3", "hybrid": "ZeRO over part of the replicas", "recompute": "recomputation",
    "adaptive": "recomputation of chosen operators", "selective": "recomputation of norms and activations",
    "offload": "offload to the host",
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved 1F1B", "zero-bubble": "zero-bubble 1F1B",
    "zbv": "ZB-V", "dualpipev": "DualPipeV", "split": "pipeline cuts inside a block", "idle": "idle devices",
    "mixed": "different ways for different layers of a stage", "placement": "axes in any but the default order",
    "uneven": "stages with different numbers of blocks", "swap": "swap to other devices (MPress)",
    "stagewise": "different recomputation in different stages", "park": "activations on the host",
    "partial": "offload of a part of something", "compression": "compressed gradients",
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """Restrictions of the space.

    >>> Limits.of({"tp": 8}, ["offload"]).allows("offload")
    False
    """

    fixed: Mapping[str, Any] = field(default_factory=dict)
    forbidden: frozenset[str] = frozenset()
    headroom: float = 0.0  # part of every device's memory that stays free

    @staticmethod
    def of(
        fixed: Mapping[str, Any] | str | None = None, forbidden: Iterable[str] = (), headroom: float = 0.0
    ) -> Limits:
        """Return checked limits: the search must know every name and value."""
        if isinstance(headroom, bool) or not isinstance(headroom, int | float) or not 0 <= headroom < 1:
            raise InputError(f"is {headroom!r}", field="headroom", valid="a part of the memory, such as 0.1")
        names = _names(forbidden)
        if isinstance(fixed, str):
            fixed = parse_short(fixed)
        if fixed is not None and not isinstance(fixed, Mapping):
            raise InputError(f"is {fixed!r}", field="fix", valid="a table like {'tp': 8}, or a text like 'tp=8'")
        for name in sorted(names):
            if name not in FORBIDDABLE:
                raise UnknownName("choice to forbid", name, FORBIDDABLE, see=", ".join(FORBIDDABLE))
        found = {name: _checked(name, value) for name, value in (fixed or {}).items()}
        for name, value in found.items():
            if (
                (name in names and value not in (0 if name == "zero" else 1, "none", "false"))
                or value in names
                or f"{name}{value}" in names
            ):
                raise InputError(f"{name} is fixed to {value} and forbidden", field="fix", valid="one of the two")
        return Limits(found, names, float(headroom))

    def allows(self, name: str) -> bool:
        return name not in self.forbidden

    def keeps(self, name: str, value: object) -> bool:
        """Return True if a value is the fixed one, or none is fixed."""
        return name not in self.fixed or self.fixed[name] == value

    def schedules(self) -> list[str]:
        """Return the schedules that may run a pipeline."""
        names = ("1f1b", "gpipe", "interleaved", "zero-bubble", *V_SHAPED)
        return [n for n in names if self.allows(n) and self.keeps("schedule", n)]


def _names(forbidden: Iterable[str] | None) -> frozenset[str]:
    """Return names from a list, or from a text with commas."""
    if isinstance(forbidden, str):
        return frozenset(name.strip() for name in forbidden.split(",") if name.strip())
    if forbidden is not None and not isinstance(forbidden, Iterable):
        raise InputError(f"is {forbidden!r}", field="forbid", valid="names, like ['offload']")
    names = list(forbidden or ())
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise InputError(f"holds {wrong[0]!r}", field="forbid", valid="names, like ['offload']")
    return frozenset(names)


def _checked(name: str, value: Any) -> Any:
    if name in _NUMBERS:
        if isinstance(value, bool) or not isinstance(value, int) or value < _NUMBERS[name]:
            raise InputError(f"is {value!r}", field=f"fix {name}", valid=f"an integer of at least {_NUMBERS[name]}")
        if name == "zero" and value > 3:
            raise InputError(f"is {value!r}", field="fix zero", valid="0, 1, 2 or 3")
        return value
    if name in _WORDS:
        text = str(value).lower() if isinstance(value, bool) else value
        if text not in _WORDS[name]:
            raise InputError(f"is {value!r}", field=f"fix {name}", valid=", ".join(_WORDS[name]))
        return text
    known = [*_NUMBERS, *_WORDS]
    raise UnknownName("choice to fix", str(name), known, see=", ".join(known))
