"""SQL over the columns of a job: DuckDB reads each trace's Parquet cache, and facts of all ranks as tables.

| table | rows |
|-------|------|
| events, work, collectives, memory, operators, labels | those of the traces (docs/traces.md), with the rank of each |
| steps | one per rank and step: its length and parts in nanoseconds |
| calls | one per collective of a rank: kind, start, stop, step, bytes, hidden nanoseconds |
| kernels | one per kernel and rank: count, total, percentiles |
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright.errors import InputError
from meshwright.traces.analysis import Analysis
from meshwright.traces.job.steps import PARTS
from meshwright.traces.rank.collectives import KINDS
from meshwright.traces.rank.facts import RankFacts
from meshwright.traces.reading import NONE
from meshwright.traces.reading.cache.cache import TABLES, parquet_of

CALLS = ("seq", "bytes", "size", "peer", "hidden")
KERNELS = ("name", "count", "total", "shortest", "median", "p90", "p99", "longest")


@dataclass(frozen=True)
class Answer:
    """Rows of a query."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


def ask(found: Analysis, query: str) -> Answer:
    """Run a query; it sees only the tables, and cannot change anything."""
    try:
        import duckdb
        import pyarrow as pa
    except ImportError as error:
        raise InputError(f"needs {error.name}", field="--sql", valid="pip install 'meshwright[traces]'") from None
    ranks = found.ranks
    if not ranks:
        raise InputError("there are no traces to ask", field="--sql")
    with tempfile.TemporaryDirectory() as spare, duckdb.connect() as database:
        folders = {facts.rank: parquet_of(facts.path, spare) for facts in ranks}
        listed = [(str(folder / f"{table}.parquet"), rank) for table in TABLES for rank, folder in folders.items()]
        database.execute("create schema told")
        database.register(
            "_files", pa.table({"filename": [f for f, _ in listed], "rank": [rank for _, rank in listed]})
        )
        database.execute("create table told.files as select * from _files")
        database.unregister("_files")
        for name in TABLES:
            files = ", ".join(_quoted(str(folder / f"{name}.parquet")) for folder in folders.values())
            database.execute(
                f"create view {name} as select rank, * exclude (filename, rank) "
                f"from read_parquet([{files}], filename=true) join told.files using (filename)"
            )
        for name, table in (("steps", _steps(found)), ("calls", _calls(ranks)), ("kernels", _kernels(ranks))):
            database.register(name, pa.table(table))
        try:
            rows = database.execute(query)
            if rows is None:
                raise InputError("is no query", field="--sql", valid="such as: show tables")
            columns = tuple(str(column[0]) for column in rows.description or ())
            return Answer(columns, tuple(rows.fetchall()))
        except duckdb.Error as error:
            raise InputError(
                str(error).strip(), field="--sql", valid=f"SQL over {', '.join((*TABLES, 'steps'))}, ..."
            ) from None


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _steps(found: Analysis) -> dict[str, Any]:
    parts = found.across.parts
    rank, step = np.nonzero(parts.present)
    made = {"rank": _together([np.array(found.across.ranks)[rank]]), "step": _together([parts.numbers[step]])}
    return made | {name: _together([getattr(parts, name)[rank, step]]) for name in ("length", *PARTS, "hidden")}


def _calls(ranks: Sequence[RankFacts]) -> dict[str, Any]:
    every = [(facts.rank, device.calls) for facts in ranks for device in facts.devices]
    numbers = [np.append(device.windows.numbers, NONE) for facts in ranks for device in facts.devices]
    found = {
        "rank": _together([np.full(len(calls), rank) for rank, calls in every]),
        "kind": [KINDS[kind] for _, calls in every for kind in calls.kind],
        "start": _together([calls.start for _, calls in every]),
        "stop": _together([calls.end for _, calls in every]),
        "step": _together([number[calls.step] for number, (_, calls) in zip(numbers, every, strict=True)]),
        "process_group": [calls.groups[group].name for _, calls in every for group in calls.group],
        "description": [calls.groups[group].description for _, calls in every for group in calls.group],
    }
    return found | {name: _together([getattr(calls, name) for _, calls in every]) for name in CALLS}


def _kernels(ranks: Sequence[RankFacts]) -> dict[str, Any]:
    every = [(facts.rank, kernel) for facts in ranks for kernel in facts.kernels]
    found: dict[str, Any] = {"rank": [rank for rank, _ in every]}
    return found | {name: [getattr(kernel, name) for _, kernel in every] for name in KERNELS}


def _together(parts: list[Any]) -> Any:
    """Join parts into one column; unknown values are null."""
    import pyarrow as pa

    values = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return pa.array(values, pa.int64(), mask=values == NONE)
