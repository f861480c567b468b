"""Decisions as words of a table, and as a self-contained page."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from meshwright.base.units import size

_COLOURS = {"none": "#76808c", "fp16": "#3b6ea8", "int8": "#3a7d44", "int4": "#c4622d", "int2": "#b8860b",
            "powersgd": "#8e4585"}  # fmt: skip
_OTHER = "#2a8b8b"
TITLES = ("gradient", "way", "topology", "pieces", "each sends", "plain sums", "expected", "steps", "speed-up")
NOTE = (
    "One gradient with nothing to hide behind. The speed-up is of training to the same loss: plain sums against what is "
    "expected, times the steps that are needed besides. Codecs were timed on this machine's processor."
)


def bandwidth(mbit: float) -> str:
    """Format a bandwidth.

    >>> bandwidth(300), bandwidth(3e3), bandwidth(1e5)
    ('300 Mbit', '3 Gbit', '100 Gbit')
    """
    return f"{mbit / 1e3:g} Gbit" if mbit >= 1e3 else f"{mbit:g} Mbit"


def seconds(value: float) -> str:
    """Format a duration.

    >>> seconds(2.5), seconds(0.0021), seconds(3e-5)
    ('2.5 s', '2.1 ms', '30 us')
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value * 1e6:.3g} us"


def times(speed_up: float) -> str:
    """Format a speed-up.

    >>> times(12.345), times(1.0), times(123.4)
    ('12x', '1.0x', '123x')
    """
    return f"{speed_up:.1f}x" if speed_up < 10 else f"{speed_up:.0f}x"


def row(cell: dict[str, Any]) -> list[str]:
    """Return a decision as text, in the columns of `TITLES`."""
    return [
        size(cell["bytes"]),
        cell["way"],
        cell["topology"],
        str(cell["pieces"]),
        size(cell["sent_bytes"]),
        seconds(cell["plain_seconds"]),
        seconds(cell["seconds"]),
        f"{cell['steps']:.2f}",
        times(cell["speed_up"]),
    ]


def page(facts: dict[str, Any]) -> str:
    """Return HTML of the facts of `front.grid`."""
    template = resources.files(__package__).joinpath("assets/decisions.html").read_text("utf-8")
    ways = list(dict.fromkeys(cell["way"] for cells in facts["grid"] for cell in cells))
    data = {
        "title": f"Gradients of {facts['processes']} processes: what pays",
        "subtitle": f"{facts['latency_seconds'] * 1e3:g} ms for a message, {facts['cores']:g} cores for each process",
        "note": NOTE,
        "at": f"At {bandwidth(facts['mbit'])}/s" if facts["mbit"] else "",
        "across": [bandwidth(mbit) for mbit in facts["mbits"]],
        "down": [size(one) for one in facts["sizes"]],
        "cells": [[_cell(cell) for cell in cells] for cells in facts["grid"]],
        "legend": [[way, _colour(way)] for way in sorted(ways)],
        "titles": TITLES,
        "rows": [row(cell) for cell in facts["table"]],
    }
    # "</" would end the script element early, wherever a name contains it.
    return template.replace("__DATA__", json.dumps(data).replace("</", "<\\/"))


def _cell(cell: dict[str, Any]) -> dict[str, Any]:
    told = [f"{size(cell['bytes'])} at {bandwidth(cell['mbit'])}/s"]
    told += [f"{name}: {word}" for name, word in zip(TITLES[1:], row(cell)[1:], strict=True)]
    return {
        "way": cell["way"],
        "colour": _colour(cell["way"]),
        "gain": times(cell["speed_up"]),
        "speed_up": cell["speed_up"],
        "told": "\n".join(told),
    }


def _colour(way: str) -> str:
    return _COLOURS.get(way.split()[0], _OTHER)
