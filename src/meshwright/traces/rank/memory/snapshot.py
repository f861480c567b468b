"""PyTorch's memory files beside a trace: snapshots of its allocator, and timelines by category.

A snapshot is a pickle, which could run any code: only lists, tuples, dictionaries, texts and numbers are accepted.
"""

from __future__ import annotations

import gzip
import json
import pickle
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.errors import InputError

MOST = 20  # maximum number of holders
# torch's numbers of the categories of a timeline.
CATEGORIES = (
    "parameter",
    "optimizer state",
    "input",
    "temporary",
    "activation",
    "gradient",
    "autograd detail",
    "unknown",
)
VALID = "a file of torch.cuda.memory._dump_snapshot"
LIBRARY = ("torch/", "site-packages/", "dist-packages/")


@dataclass(frozen=True)
class Snapshot:
    """Peak of one device. Bytes as requested: before the allocator rounds them up."""

    device: int
    peak: int  # in use at the peak of the recorded history
    reserved: int  # by the allocator when the snapshot was taken
    in_use: int  # when the snapshot was taken
    holders: tuple[tuple[str, int, int], ...]  # at the peak: line of Python, bytes, blocks; the largest MOST
    events: int


class _Plain(pickle.Unpickler):
    """Unpickler of containers, texts and numbers only."""

    def find_class(self, module: str, name: str) -> Any:
        raise InputError(f"asks for {module}.{name}, which a snapshot does not need", valid=VALID)


def read_snapshot(path: str | Path) -> tuple[Snapshot, ...]:
    """Read a snapshot, and return the peak of each device."""
    try:
        with open(path, "rb") as file:
            loaded = _Plain(file).load()
    except InputError as error:
        raise error.at(file=str(path)) from None
    except (
        OSError,
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        IndexError,
        KeyError,
        AttributeError,
        TypeError,
    ) as error:
        raise InputError(f"cannot be read: {error}", file=str(path), valid=VALID) from None
    segments = loaded.get("segments") if isinstance(loaded, dict) else None
    histories = loaded.get("device_traces") if isinstance(loaded, dict) else None
    if not isinstance(segments, list) or not isinstance(histories, list):
        raise InputError("has no 'segments' and 'device_traces'", file=str(path), valid=VALID)
    try:
        used = {segment.get("device", 0) for segment in segments} | {i for i, one in enumerate(histories) if one}
        return tuple(
            _device(device, segments, histories[device] if device < len(histories) else []) for device in sorted(used)
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"has an unexpected form: {error!r}", file=str(path), valid=VALID) from None


def _device(device: int, segments: list[dict[str, Any]], history: list[dict[str, Any]]) -> Snapshot:
    """Replay the history backwards from the blocks live at the end: undoing an allocation removes it."""
    mine = [segment for segment in segments if segment.get("device", 0) == device]
    live: dict[int, tuple[int, list[Any]]] = {}
    for segment in mine:
        at = segment["address"]
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                asked = block.get("requested_size", block["size"])  # the history counts requested bytes, too
                live[block.get("address", at)] = (asked, block.get("frames") or _old_frames(block))
            at += block["size"]
    in_use = total = peak = sum(size for size, _ in live.values())
    at_peak = len(history)
    for place in range(len(history) - 1, -1, -1):
        event = history[place]
        total += {"alloc": -1, "free_completed": 1}.get(event["action"], 0) * event.get("size", 0)
        if total > peak:
            peak, at_peak = total, place
    for event in reversed(history[at_peak:]):
        if event["action"] == "alloc":
            live.pop(event["addr"], None)
        elif event["action"] == "free_completed":
            live[event["addr"]] = (event["size"], [])
    for event in history[:at_peak]:  # frames are recorded where a block is allocated
        if event["action"] == "alloc" and event["addr"] in live:
            live[event["addr"]] = (live[event["addr"]][0], event.get("frames") or [])
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for size, frames in live.values():
        entry = found[_line(frames)]
        entry[0] += size
        entry[1] += 1
    holders = sorted(
        ((line, size, count) for line, (size, count) in found.items()), key=lambda held: (-held[1], held[0])
    )
    return Snapshot(
        device, peak, sum(segment["total_size"] for segment in mine), in_use, tuple(holders[:MOST]), len(history)
    )


def _old_frames(block: dict[str, Any]) -> list[Any]:
    """Return frames from a block's history, where torch before 2.1 kept them."""
    history = block.get("history") or [{}]
    return list(history[0].get("frames") or [])


def _line(frames: list[dict[str, Any]]) -> str:
    """Return the innermost line of the program itself, else of any Python code."""
    python = [frame for frame in frames if str(frame.get("filename", "")).endswith(".py")]
    own = [frame for frame in python if not any(part in frame["filename"] for part in LIBRARY)]
    for frame in [*own, *python][:1]:
        return f"{frame['filename']}:{frame['line']} {frame['name']}"
    return "not recorded"


@dataclass(frozen=True)
class Categories:
    """Peak of a timeline that `export_memory_timeline` wrote as raw JSON. Bytes."""

    peak: int
    time: int  # nanoseconds since the epoch; -1 before the first event
    held: dict[str, int]  # then, by category


def read_timeline(path: str | Path) -> Categories:
    """Read a timeline by categories: a list of [time, action, bytes, category]."""
    valid = "a .raw.json file of torch.profiler's export_memory_timeline"
    try:
        data = Path(path).read_bytes()
        rows = np.array(json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data), np.int64)
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise InputError(f"cannot be read: {error}", file=str(path), valid=valid) from None
    if rows.ndim != 2 or rows.shape[1] != 4 or not len(rows) or not (rows[:, 3] >= 0).all() & (rows[:, 3] < 8).all():
        raise InputError("is no list of [time, action, bytes, category]", file=str(path), valid=valid)
    # Changes at one moment belong together: a tensor that is written to leaves and returns at once.
    last = np.append(rows[1:, 0] != rows[:-1, 0], True)
    total = np.where(last, np.cumsum(rows[:, 2]), np.iinfo(np.int64).min)
    peak = int(total.argmax())
    held = np.bincount(rows[: peak + 1, 3], rows[: peak + 1, 2], minlength=len(CATEGORIES))
    named = {name: int(size) for name, size in zip(CATEGORIES, held, strict=True) if size}
    return Categories(int(total[peak]), int(rows[peak, 0]), named)
