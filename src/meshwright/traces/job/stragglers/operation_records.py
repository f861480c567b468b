"""Stragglers in jobs that were recorded operation by operation, as the published straggler jobs are.

A folder has a `trace-NAME.parquet` per job: a row per operation of a worker, with the columns of `COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.traces.job.stragglers.what_if import Floats, Operation, Program, program, what_if
from meshwright.traces.reading import Note

COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id")
SLOWEST = 0.03  # share of all workers, at least one, that count as slowest
MATTERS = 1.05  # a job with a smaller slow-down has no straggler
EXPLAINS = 0.5  # share of the slow-down that a named cause must explain


@dataclass(frozen=True, eq=False)
class Records:
    """Operations of all steps of a job: arrays are [operations, data-parallel ranks, steps], in seconds."""

    name: str
    steps: tuple[int, ...]
    ranks: NDArray[np.int64]  # [data-parallel rank, stage]: the rank that stands for the worker
    program: Program
    starts: Floats  # since the beginning of the step
    ends: Floats
    notes: tuple[Note, ...]


@dataclass(frozen=True)
class RecordedJob:
    """Result of a study of a job. Slow-downs are factors: 1.5 means that steps take half as long again."""

    name: str
    steps: int
    workers: int
    measured: float  # seconds of the mean step
    simulated: float  # without delays of the hosts
    ideal: float  # with every operation as long as is usual for its kind
    slowdown: float  # simulated / ideal
    by_kind: tuple[tuple[str, float], ...]  # slow-down with only operations of this kind as recorded, largest first
    by_replica: tuple[float, ...]  # with only this data-parallel rank's operations as recorded
    by_stage: tuple[float, ...]
    slowest: tuple[int, ...]  # ranks of the slowest workers
    by_slowest: float  # share of the slow-down that they explain: M_W
    by_last_stage: float  # share that the last stage explains: M_S
    cause: str  # "worker", "stage" or ""
    ranks: tuple[int, ...]  # named ranks: the slow workers, or all of the slow stage
    stage: int | None
    notes: tuple[Note, ...]


def find_records(folder: str | Path) -> tuple[Path, ...]:
    """Return the files of a folder that hold such records.

    >>> [path.name for path in find_records("tests/data/traces/straggler")]
    ['trace-AR.parquet', 'trace-ST.parquet']
    """
    return tuple(path for path in sorted(Path(folder).glob("trace-*.parquet")) if set(COLUMNS) <= set(_names(path)))


def read_records(path: str | Path) -> Records:
    """Read the records of a job; steps with a missing operation are left out, with a note."""
    table = _table(Path(path))
    try:
        operations, inverse = _operations(table)
        replicas, steps = int(table["dp_rank"].max()) + 1, np.unique(table["step"])
        step = np.searchsorted(steps, table["step"])
        shape = (len(operations), replicas, len(steps))
        starts, ends = np.full(shape, np.nan), np.full(shape, np.nan)
        where = (inverse, table["dp_rank"].astype(np.int64), step)
        starts[where] = table["start_ts"]
        ends[where] = table["start_ts"] + table["duration"]
        kept = ~np.isnan(starts).any(axis=(0, 1))
        if not kept.any():
            raise InputError("no step has every operation of every worker", valid="records of whole steps")
        starts, ends = starts[:, :, kept], ends[:, :, kept]
        made = program({one: float(starts[place, 0, 0]) for place, one in enumerate(operations)})
    except InputError as error:
        raise error.at(file=str(path)) from None
    order = [operations.index(one) for one in made.operations]
    begin = starts.min(axis=(0, 1))
    ranks = np.zeros((replicas, int(table["stage"].max()) + 1), np.int64)
    ranks[table["dp_rank"], table["stage"]] = table["rank"]
    left = int((~kept).sum())
    notes = (Note("left out: steps in which operations are missing", left),) if left else ()
    name = Path(path).stem.removeprefix("trace-")
    return Records(name, tuple(steps[kept].tolist()), ranks, made, starts[order] - begin, ends[order] - begin, notes)


def study(records: Records) -> RecordedJob:
    """Compute slow-downs by cause, and the cause that explains most of it.

    >>> job = study(read_records("tests/data/traces/straggler/trace-ST.parquet"))
    >>> job.cause, job.stage, round(job.slowdown, 2), round(job.by_last_stage, 2)
    ('stage', 3, 1.18, 1.22)
    """
    made = records.program
    job = what_if(made, records.starts, records.ends)
    replicas, stages = records.ranks.shape
    stage, kinds = (np.array([getattr(one, name) for one in made.operations]) for name in ("stage", "kind"))
    by_replica = tuple(job.only(np.s_[:, replica]) for replica in range(replicas))
    by_stage = tuple(job.only(stage == number) for number in range(stages))
    by_kind = ((str(kind), job.only(kinds == kind)) for kind in np.unique(kinds))
    score = np.minimum.outer(by_replica, by_stage)
    count = -(-score.size * round(100 * SLOWEST) // 100)
    worst = sorted(np.ndindex(*score.shape), key=lambda at: (-score[at], records.ranks[at]))[:count]
    by_slowest = job.without(_of_workers(made, replicas, worst))
    shares = [job.without(stage == number) for number in range(stages)]
    slowdown = job.now / job.best
    cause, named, workers = _cause(slowdown, by_slowest, shares, score)
    return RecordedJob(
        name=records.name,
        steps=len(records.steps),
        workers=score.size,
        measured=float(records.ends.max(axis=(0, 1)).mean()),
        simulated=job.now,
        ideal=job.best,
        slowdown=slowdown,
        by_kind=tuple(sorted(by_kind, key=lambda pair: -pair[1])),
        by_replica=by_replica,
        by_stage=by_stage,
        slowest=_ranks(records, worst),
        by_slowest=by_slowest,
        by_last_stage=shares[-1],
        cause=cause,
        ranks=_ranks(records, workers),
        stage=named,
        notes=records.notes,
    )


def _cause(
    slowdown: float, by_slowest: float, by_stage: list[float], score: Floats
) -> tuple[str, int | None, list[tuple[int, ...]]]:
    """Return the cause that explains most of the slow-down: workers before stages, since a slow worker slows its stage."""
    every = list(np.ndindex(*score.shape))
    if slowdown < MATTERS:
        return "", None, []
    if by_slowest >= EXPLAINS:
        enough = 1 + EXPLAINS * (slowdown - 1)
        return "worker", None, [at for at in every if score[at] >= enough]
    stage = int(np.argmax(by_stage))
    if by_stage[stage] >= EXPLAINS:
        return "stage", stage, [at for at in every if at[1] == stage]
    return "", None, []


def _of_workers(made: Program, replicas: int, workers: Iterable[tuple[int, ...]]) -> NDArray[np.bool_]:
    """Return a mask of the operations and data-parallel ranks that belong to some workers."""
    chosen = np.zeros((len(made.operations), replicas), np.bool_)
    for replica, stage in workers:
        chosen[[one.stage == stage for one in made.operations], replica] = True
    return chosen


def _ranks(records: Records, workers: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(int(records.ranks[at]) for at in workers))


def _operations(table: dict[str, NDArray[Any]]) -> tuple[list[Operation], NDArray[np.int64]]:
    """Return the distinct operations, and the operation of each row."""
    kinds, kind = np.unique(table["optype"], return_inverse=True)
    rows = np.stack([kind.reshape(-1), table["seq_id"].astype(np.int64), table["stage"].astype(np.int64)])
    found, inverse = np.unique(rows, axis=1, return_inverse=True)
    return [Operation(str(kinds[a]), int(b), int(c)) for a, b, c in found.T.tolist()], inverse.reshape(-1)


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise InputError("records of operations need pyarrow", valid="pip install 'meshwright[data]'") from None
    return pyarrow.parquet


def _names(path: Path) -> list[str]:
    try:
        return list(_parquet().read_schema(path).names)
    except (OSError, ValueError):  # includes pyarrow's own errors
        return []


def _table(path: Path) -> dict[str, NDArray[Any]]:
    if not path.is_file():
        raise InputError("there is no such file", file=str(path), valid="a trace-NAME.parquet")
    missing = sorted(set(COLUMNS) - set(_names(path)))
    if missing:
        raise InputError("is not there", file=str(path), field=missing[0], valid=f"columns {', '.join(COLUMNS)}")
    table = _parquet().read_table(path, columns=list(COLUMNS))
    if not table.num_rows:
        raise InputError("has no rows", file=str(path), valid="a row per operation")
    columns = {name: table[name].to_numpy() for name in COLUMNS if name != "optype"}
    columns |= {name: columns[name].astype(np.float64) for name in ("start_ts", "duration")}
    return columns | {"optype": np.array(table["optype"].to_pylist(), np.str_)}
