"""Columns of a trace's events: the JSON key of each, and its kind of value.

This is the only place that defines them: the compiled scanner and the portable one both read these classes. A new key
of `args` becomes a column by one more line here, whose type gives numbers, texts or lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, NewType, get_type_hints

import numpy as np
from numpy.typing import NDArray

NONE = int(np.iinfo(np.int64).min)  # stands for a missing value
Ints = NDArray[np.int64]
Texts = NDArray[np.int32]
Lists = NewType("Lists", Texts)  # texts that are JSON lists, as written in the file


class Kind(IntEnum):
    """Kind of a value; as in event.c."""

    WHOLE = 0  # a whole number, NONE if missing
    TEXT = 1  # the number of a text in `Trace.texts`, 0 (the empty text) if missing
    TIME = 2  # decimal microseconds, kept as nanoseconds
    RAW = 3  # pid or tid: a number or a string
    PHASE = 4  # one letter; 0 if missing
    ARGS = 5  # the object with further keys
    LIST = 6  # a list, whose JSON is kept as a text, or a string that contains one


@dataclass(frozen=True)
class Key:
    """Key to read: of an event, or of its args, for one of the tables."""

    word: str
    kind: Kind
    table: int = -1  # -1: a column of every event


# In the order of the slots in event.c.
OUTER = (
    Key("ph", Kind.PHASE),
    Key("cat", Kind.TEXT),
    Key("name", Kind.TEXT),
    Key("pid", Kind.RAW),
    Key("tid", Kind.RAW),
    Key("ts", Kind.TIME),
    Key("dur", Kind.TIME),
    Key("id", Kind.WHOLE),
    Key("args", Kind.ARGS),
)
EVERYWHERE = (Key("correlation", Kind.WHOLE), Key("External id", Kind.WHOLE))


@dataclass(frozen=True, eq=False)
class Events:
    """Columns of every event, in the order of the file, which is arbitrary."""

    phase: NDArray[np.uint8]  # the letter's code: X complete, s/t/f flow, i instant, M metadata, C counter; 0 none
    category: NDArray[np.uint8]  # a Category
    name: Texts
    track: NDArray[np.int32]  # into Trace.tracks
    ts: Ints  # nanoseconds, relative to Trace.base_ns
    dur: Ints  # nanoseconds, never negative; 0 if an event has none
    link: Ints  # correlation of a launch and of the device work it launched; id of a flow
    external: Ints  # External id: the same number in an operator and in its work

    def __len__(self) -> int:
        return len(self.phase)


@dataclass(frozen=True, eq=False)
class Work:
    """Position and size of a device's work."""

    row: Ints  # of the event
    device: Annotated[Ints, "device"]
    stream: Annotated[Ints, "stream"]
    bytes: Annotated[Ints, "bytes"]


@dataclass(frozen=True, eq=False)
class Collectives:
    """Arguments of a collective: on the operator `record_param_comms` and on the kernel it launched."""

    row: Ints
    name: Annotated[Texts, "Collective name"]
    nelems_in: Annotated[Ints, "In msg nelems"]
    nelems_out: Annotated[Ints, "Out msg nelems"]
    dtype: Annotated[Texts, "dtype"]
    group_size: Annotated[Ints, "Group size"]
    group: Annotated[Texts, "Process Group Name"]
    group_id: Annotated[Ints, "Process Group ID"]  # before there were names
    description: Annotated[Texts, "Process Group Description"]
    ranks: Annotated[Texts, "Process Group Ranks"]  # the writer shortens long lists
    seq: Annotated[Ints, "Seq"]
    source: Annotated[Ints, "Src Rank"]
    target: Annotated[Ints, "Dst Rank"]


@dataclass(frozen=True, eq=False)
class Memory:
    """Allocations (positive bytes) and frees (negative)."""

    row: Ints
    address: Annotated[Ints, "Addr"]
    bytes: Annotated[Ints, "Bytes"]
    allocated: Annotated[Ints, "Total Allocated"]
    reserved: Annotated[Ints, "Total Reserved"]
    device_type: Annotated[Ints, "Device Type"]  # 0 CPU, 1 CUDA, 6 HIP
    device: Annotated[Ints, "Device Id"]


@dataclass(frozen=True, eq=False)
class Labels:
    """Names of processes and threads, on events of phase M."""

    row: Ints
    name: Annotated[Texts, "name"]
    label: Annotated[Texts, "labels"]


@dataclass(frozen=True, eq=False)
class Operators:
    """Inputs of operators, and links between operators and Python functions."""

    row: Ints
    dims: Annotated[Lists, "Input Dims"]  # [[8, 512], [], ...]: an entry per input
    types: Annotated[Lists, "Input type"]  # ["c10::BFloat16", "Scalar", ...]
    concrete: Annotated[Lists, "Concrete Inputs"]  # ["", "1", "[3, 3]", ...]: inputs that are no tensors
    sequence: Annotated[Ints, "Sequence number"]  # the same in an operator and in its backward
    forward_thread: Annotated[Ints, "Fwd thread id"]  # 0 in the forward itself
    python: Annotated[Ints, "Python id"]
    python_parent: Annotated[Ints, "Python parent id"]
    python_module: Annotated[Ints, "Python module id"]


TABLES: tuple[type[Any], ...] = (Work, Collectives, Memory, Labels, Operators)
NAMES = tuple(table.__name__.lower() for table in TABLES)  # field names of a trace
KINDS: dict[Any, Kind] = {Ints: Kind.WHOLE, Texts: Kind.TEXT, Lists: Kind.LIST}


def _read(table: type[Any]) -> dict[str, Key]:
    hints = get_type_hints(table, include_extras=True)
    return {
        name: Key(hint.__metadata__[0], KINDS[hint.__origin__], TABLES.index(table))
        for name, hint in hints.items()
        if name != "row"
    }


_KEYS = {table: _read(table) for table in TABLES}
INNER = EVERYWHERE + tuple(key for keys in _KEYS.values() for key in keys.values())


def widths_of(table: type[Any]) -> list[type[Any]]:
    """Return the dtype of each column, that of `row` first."""
    return [np.int64, *(np.int64 if key.kind is Kind.WHOLE else np.int32 for key in _KEYS[table].values())]


def keys_of(table: type[Any]) -> dict[str, Key]:
    """Return the columns of a table beside `row`, and the key of each.

    >>> keys_of(Labels)["label"]
    Key(word='labels', kind=<Kind.TEXT: 1>, table=3)
    """
    return _KEYS[table]


@dataclass(frozen=True, eq=False)
class Columns:
    """Columns of every event, as a scanner finds them: like `Events`, but categories are still texts."""

    phase: NDArray[np.uint8]
    category: Texts
    name: Texts
    track: NDArray[np.int32]
    ts: Ints
    dur: Ints
    link: Ints
    external: Ints


# Counts of a scanner: negative durations, taken as zero; complete events without a time, left out; those without a
# duration, taken as zero; items of the list that are no events, left out.
COUNTS = ("negative", "without_time", "without_duration", "not_objects")


@dataclass(frozen=True, eq=False)
class Scanned:
    """Result of a scanner. Texts are still raw JSON: escapes as written, strings without their quotes."""

    columns: Columns
    tables: tuple[tuple[NDArray[Any], ...], ...]  # columns of TABLES: one row per event that has any of its keys
    texts: tuple[bytes, ...]
    lists: tuple[bytes, ...]  # those of columns of lists, strings with their quotes; the first is empty
    tracks: tuple[tuple[bytes, bytes], ...]  # pid and tid as JSON, empty if missing
    counts: dict[str, int]  # each of COUNTS
