"""Read a Hugging Face config field by field, so that one message names everything that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.errors import InputError, shorten

# No real dimension is larger; a typo must not start a planning run that never ends.
LARGEST = 10_000_000
MOST_LAYERS = 10_000


class Fields:
    """Config with every read checked. Missing required fields are collected and reported together."""

    def __init__(self, config: Mapping[str, Any], file: str = "") -> None:
        self._config = config
        self.file = file
        self.missing: list[str] = []

    def __getitem__(self, name: str) -> Any:
        return self._config.get(name)

    def has(self, name: str) -> bool:
        """Return True if the config mentions a field, even as null."""
        return name in self._config

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """Return the first of `names` (aliases) that is set, as a whole number in range."""
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                self._refuse(name, value, f"an integer from {least} to {most}")
            if not least <= value <= most:
                self._refuse(name, value, f"an integer from {least} to {most}")
            return int(value)
        if default is None:
            self.missing.append(names[0])
            return least
        return default

    def layers(self, *names: str, default: int | None = None) -> int:
        return self.integer(*names, default=default, most=MOST_LAYERS)

    def fraction(self, *names: str, default: float = 0.0) -> float:
        """Return a rate such as dropout; absent or null is the default."""
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                self._refuse(name, value, "a number from 0 up to, not including, 1")
            return float(value)
        return default

    def number(self, name: str, default: float, least: float = 0.0, most: float = 1e6) -> float:
        value = self._config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            self._refuse(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self._refuse(name, value, "true or false")
        return bool(value)

    def refuse_if(self, name: str) -> None:
        """Refuse a switch whose parts are not described here, rather than count wrongly."""
        if self.flag(name, False):
            raise InputError("true is not supported", file=self.file, field=name, valid="false")

    def integers(self, name: str, *, least: int = 0, most: int = LARGEST) -> list[int]:
        value = self._config.get(name)
        if value is None:
            self.missing.append(name)
            return [1]
        whole = isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        if not whole or not all(least <= v <= most for v in value):
            self._refuse(name, value, f"a list of integers from {least} to {most}")
        return list(value)

    def divides(self, part: str, part_value: int, whole: str, whole_value: int) -> None:
        if not self.missing and whole_value % part_value:
            raise InputError(
                f"{whole} {whole_value} is not a multiple of {part} {part_value}", file=self.file, field=part
            )

    def require_complete(self) -> None:
        """Raise one error for all missing required fields."""
        if self.missing:
            missing = ", ".join(dict.fromkeys(self.missing))
            family = self._config.get("model_type", "?")
            raise InputError(
                f"a {family} config needs these fields too: {missing}", file=self.file, field=self.missing[0]
            )

    def _refuse(self, name: str, value: Any, valid: str) -> None:
        raise InputError(f"is {shorten(repr(value), 40)}", file=self.file, field=name, valid=valid)
