"""How fast traces become numbers: CPU seconds and peak memory for a job of N ranks.

    python benchmarks/analyze.py [--ranks 1 8] [--keep FOLDER]

The input is a real trace (tests/data/traces, ResNet on A100, rank 0 of 2) laid 13 times one after the other and written
as the profiler writes it: 526,957 events and about 124 MB of text per rank, packed with gzip. Of each eight ranks, the
sixth has compute kernels that take 15 % longer. Every contender runs in a process of its own and answers the same
questions: each rank's busy, idle, compute, communication, exposed communication, steps and table of kernels.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from meshwright.observe.rank.breakdown import breakdown
from meshwright.observe.rank.communication import communicates
from meshwright.observe.rank.kernels import kernel_table
from meshwright.observe.traces import read_trace

ROOT = Path(__file__).resolve().parents[1]
SEED = ROOT / "tests/data/traces/hta/a100_ddp_resnet_2rank_rank0.json.gz"
TIMES = 13
SLOW, SLOWER = 5, 1.15  # of each eight ranks this one, by so much
APART = 10_000_000  # between ids of two repetitions


def ours(files: list[Path]) -> list[Any]:
    """One rank after the other; nothing of a rank is kept but its figures."""
    found = []
    for file in files:
        trace = read_trace(file)
        found.append((breakdown(trace), kernel_table(trace)))
    return found


# A peer is one more function of files, measured like ours; what both compute is then held against each other.
CONTENDERS: dict[str, Callable[[list[Path]], list[Any]]] = {"meshwright": ours}


def repeated(seed: dict[str, Any], slow: bool) -> Iterator[dict[str, Any]]:
    """The seed's events, each repetition later, with ids and steps of its own; what has no time, once."""
    timed = [event for event in seed["traceEvents"] if "cat" in event and event["cat"] != "Trace"]
    yield from (event for event in seed["traceEvents"] if "cat" not in event or event["cat"] == "Trace")
    period = max(e["ts"] + e.get("dur", 0) for e in timed) - min(e["ts"] for e in timed) + 100
    steps = sum(e["name"].startswith("ProfilerStep#") and e["cat"] == "user_annotation" for e in timed)
    for times in range(TIMES):
        for event in timed:
            made = event | {"ts": round(event["ts"] + times * period, 3)}
            if "id" in made:
                made["id"] += times * APART
            if "args" in made:
                ids = {
                    key: made["args"][key] + times * APART
                    for key in ("correlation", "External id")
                    if key in made["args"]
                }
                made["args"] = made["args"] | ids
            if made["name"].startswith("ProfilerStep#"):
                made["name"] = f"ProfilerStep#{int(made['name'][13:]) + times * steps}"
            if slow and made["cat"] == "kernel" and not communicates(made["name"]):
                made["dur"] = round(made["dur"] * SLOWER, 3)
            yield made


def as_text(event: dict[str, Any]) -> str:
    """An event in the profiler's layout."""
    first = [f'"{key}": {json.dumps(event[key])}' for key in event if key not in ("ts", "dur", "args")]
    times = [f'"{key}": {event[key]:.3f}' for key in ("ts", "dur") if key in event]
    args = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in event.get("args", {}).items())
    inner = f',\n    "args": {{\n      {args}\n    }}' if "args" in event else ""
    return f"  {{\n    {', '.join(first)},\n    {', '.join(times)}{inner}\n  }}"


def write_ranks(folder: Path, ranks: int) -> list[Path]:
    """Files of a job. Headers differ by rank, events only between slow ranks and others: each is packed once."""
    seed = json.loads(gzip.decompress(SEED.read_bytes()))
    header = {key: value for key, value in seed.items() if key != "traceEvents"}
    bodies: dict[bool, bytes] = {}
    files = []
    for rank in range(ranks):
        slow = rank % 8 == SLOW
        if slow not in bodies:
            text = ",\n".join(map(as_text, repeated(seed, slow))) + "\n  ]\n}\n"
            bodies[slow] = gzip.compress(text.encode(), 6)
        told = header | {"distributedInfo": header["distributedInfo"] | {"rank": rank, "world_size": ranks}}
        begin = json.dumps(told, indent=2)[:-2] + ',\n  "traceEvents": [\n'
        files.append(folder / f"rank{rank}.json.gz")
        files[-1].write_bytes(gzip.compress(begin.encode()) + bodies[slow])
    return files


def _measured(name: str, files: list[Path], answer: Connection) -> None:
    start = time.perf_counter()
    CONTENDERS[name](files)
    used = resource.getrusage(resource.RUSAGE_SELF)
    answer.send((time.perf_counter() - start, used.ru_utime + used.ru_stime, peak_mib()))


def peak_mib() -> float:
    """Of this process; ru_maxrss would count what its parent held when it was started."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measured(name: str, files: list[Path]) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak MiB of a contender, imports included in the last two."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_measured, args=(name, files, there))
    process.start()
    found: tuple[float, float, float] = here.recv()
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--keep", type=Path, help="write the traces here and leave them")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        files = write_ranks(folder, max(given.ranks))
        one, packed = read_trace(files[0]), files[0].stat().st_size
        print(f"per rank: {len(one.events):,} events, {one.text_bytes / 1e6:.1f} MB, {packed / 1e6:.1f} MB packed")
        size = one.text_bytes / 1e6
        for ranks in given.ranks:
            for name in CONTENDERS:
                wall, cpu, peak = measured(name, files[:ranks])
                rate = size * ranks / cpu
                print(
                    f"{name:12} {ranks:4} ranks: {cpu:7.2f} CPU-s  {wall:7.2f} s  {peak:6.0f} MiB  {rate:6.0f} MB/CPU-s"
                )


if __name__ == "__main__":
    main()
