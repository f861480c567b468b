"""How fast traces become answers: CPU seconds and peak memory for a job of N ranks, beside HolisticTraceAnalysis.

    python benchmarks/analyze.py [--ranks 1 8 64] [--hta PYTHON | --alone] [--bytes 10e9] [--keep FOLDER]

The input is a real trace (tests/data/traces, ResNet on A100, rank 0 of 2) laid 13 times one after the other and written
as the profiler writes it: 526,957 events and about 127 MB of text per rank, packed with gzip. Of each eight ranks, the
sixth has compute kernels that take 15 % longer.

Ours is the call a user makes, `meshwright.analyze(folder)`: with cache=False, which keeps nothing, as the peer; as it is,
which keeps Parquet beside the traces; and once more from that Parquet. The peer (0.5.0, pandas 2, in a venv that is made for
it, or in --hta PYTHON) loads the folder and answers what it can: temporal breakdown, overlap, kernels, idle time, bandwidth
of copies, stragglers. Each runs as a command of its own, ours three times where that takes no two seconds; CPU seconds and
memory are those of all its processes, start and imports included.

What both compute must agree. The peer silently drops the last step and work without a recorded launch: ours is restricted
in the same way for the comparison, and only there. It would also round times down to microseconds, which it is told not
to. Not comparable: stragglers (it always names some), idle time by cause, and step times, which it does not give.

--bytes makes as many ranks as give so much text, and extrapolates ours to 124 GB and 1,000 ranks.
"""

from __future__ import annotations

import argparse
import compileall
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.traces.rank.communication_kernels import communicates
from meshwright.traces.rank.device_activity import work_of
from meshwright.traces.rank.timeline.breakdown import shares
from meshwright.traces.rank.timeline.steps import host_steps
from meshwright.traces.reading import NONE, read_trace

if TYPE_CHECKING:
    from benchmarks.process_tree import Taken

ROOT = Path(__file__).resolve().parents[1]
SEED = ROOT / "tests/data/traces/hta/a100_ddp_resnet_2rank_rank0.json.gz"
PEER = ROOT / "benchmarks/hta_peer.py"
PEER_PACKAGES = ("HolisticTraceAnalysis==0.5.0", "pandas<3")
TIMES = 13
SLOW, SLOWER = 5, 1.15  # of each eight ranks this one, by so much
SHORT = 2.0  # CPU seconds
APART = 10_000_000  # between ids of two repetitions
WHOLE_JOB = 124e9  # bytes of text of 1,000 ranks
LESS_CPU, LESS_MEMORY, MORE_RANKS = 15, 5, 1.3  # the bars: how much less than the peer, and 64 ranks against 8
EXACT = {"HTA_DISABLE_NS_ROUNDING": "1"}  # of the peer: without it its sums are short by up to 2 %
OURS = "import sys, meshwright; print(len(meshwright.analyze(sys.argv[1], cache=bool(sys.argv[2])).ranks))"


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


def linked(files: list[Path], folder: Path) -> Path:
    """A folder of the same files: each contender has its own, and what one leaves there the other does not see."""
    folder.mkdir()
    for file in files:
        os.link(file, folder / file.name)
    return folder


def ours(folder: Path, keep: bool = True, forget: bool = False) -> Taken:
    """One run; where it takes no two seconds the middle of three, since a short disturbance counts there."""
    from benchmarks.process_tree import taken

    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    found: list[Taken] = []
    while not found or (len(found) < 3 and found[0].cpu < SHORT):
        for kept in folder.glob("*.meshwright") if forget else ():
            shutil.rmtree(kept)
        found.append(taken([sys.executable, "-c", OURS, str(folder), "keep" if keep else ""], env))
        assert int(found[-1].output) == len(list(folder.glob("*.json.gz")))
    return sorted(found, key=lambda one: one.cpu)[len(found) // 2]


def line(name: str, ranks: int, found: Taken, size: float) -> str:
    rate = f"{size / found.cpu:6.0f} MB/CPU-s"
    return f"{name:24} {ranks:4} ranks: {found.cpu:8.2f} CPU-s {found.wall:8.2f} s {found.peak:7.0f} MiB {rate}"


def restricted(file: Path) -> dict[str, Any]:
    """Our figures of what the peer looks at: work launched before the last step began. Microseconds."""
    trace = read_trace(file)
    (work,) = work_of(trace)
    last = host_steps(trace)[-1].start
    kept = work.some((work.launch != NONE) & (work.launch < last))
    found = shares(kept.starts, kept.ends, kept.kind)
    sums: dict[str, float] = {}
    for name, time in zip(trace.events.name[kept.rows], kept.ends - kept.starts, strict=True):
        sums[trace.texts[name]] = sums.get(trace.texts[name], 0) + time / 1e3
    return {
        "idle_time(us)": found.idle / 1e3,
        "compute_time(us)": found.compute / 1e3,
        "non_compute_time(us)": (found.busy - found.compute) / 1e3,
        "kernel_time(us)": found.span / 1e3,
        "overlap": 100 * found.overlap / found.communication,
        "kernels": sums,
    }


def compare(files: list[Path], told: dict[str, Any]) -> float:
    """The largest relative difference over all ranks and figures that both have."""
    worst = 0.0
    for file in files[:8]:  # ranks beyond are these again
        rank, mine = int(file.name[4:].split(".")[0]), restricted(file)
        (temporal,) = (row for row in told["temporal"] if row["rank"] == rank)
        (overlap,) = (row["comp_comm_overlap_pctg"] for row in told["overlap"] if row["rank"] == rank)
        theirs = {row["name"]: row["sum (us)"] for row in told["kernels"] if row["rank"] == rank}
        assert theirs.keys() == mine["kernels"].keys(), theirs.keys() ^ mine["kernels"].keys()
        pairs = [(mine[key], temporal[key]) for key in mine if key.endswith("(us)")]
        pairs += [(mine["kernels"][name], theirs[name]) for name in theirs]
        worst = max(worst, *(abs(a - b) / max(b, 1) for a, b in pairs), abs(mine["overlap"] - overlap) / 100)
    return worst


def peer(folder: Path, given: str | None) -> str:
    """The Python that has the peer."""
    if given:
        return given
    print("making a venv for the peer")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin/python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PEER_PACKAGES], check=True)
    return python


def one_size(ranks: int, files: list[Path], folder: Path, size: float, python: str) -> Taken:
    """Both contenders on the same ranks; ours is given back."""
    from benchmarks.process_tree import taken

    mine = linked(files[:ranks], folder / f"ours-{ranks}")
    alone = ours(mine, keep=False)
    print(line("meshwright, nothing kept", ranks, alone, size * ranks))
    first = ours(mine, forget=True)
    print(line("meshwright", ranks, first, size * ranks))
    print(line("meshwright, from Parquet", ranks, ours(mine), size * ranks))
    if python:
        their_files = linked(files[:ranks], folder / f"peer-{ranks}")
        theirs = taken([python, "-W", "ignore", str(PEER), str(their_files)], os.environ | EXACT)
        print(line("HolisticTraceAnalysis", ranks, theirs, size * ranks))
        for name, one in (("keeping Parquet", first), ("keeping nothing, as the peer", alone)):
            cpu, memory = theirs.cpu / one.cpu, theirs.peak / one.peak
            print(f"  {name}: CPU time {cpu:.1f} times less (bar {LESS_CPU}), memory {memory:.1f} (bar {LESS_MEMORY})")
        told = json.loads(theirs.output.splitlines()[-1])
        worst = 100 * compare(files[:ranks], told)
        print(f"  what both compute differs by at most {worst:.4f} %; it names {told['stragglers']} as slow")
    return first


def large(files: list[Path], folder: Path, size: float) -> None:
    found = ours(linked(files, folder / "large"))
    text = size * 1e6 * len(files)
    print(line("meshwright", len(files), found, size * len(files)))
    print(
        f"  {text / 1e9:.1f} GB in {found.wall:.1f} s on {os.cpu_count()} cores: 124 GB of 1,000 ranks in"
        f" {found.wall * WHOLE_JOB / text / 60:.1f} minutes"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--hta", help="a Python that has the peer; otherwise a venv is made")
    parser.add_argument("--alone", action="store_true", help="without the peer")
    parser.add_argument("--bytes", type=float, default=0, help="of text, in as many ranks as that takes")
    parser.add_argument("--keep", type=Path, help="write everything into this new folder and leave it")
    given = parser.parse_args()
    compileall.compile_dir(ROOT / "src", quiet=2)  # as pip does with what it installs, the peer included
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        (folder / "traces").mkdir(parents=True)
        files = write_ranks(folder / "traces", max(given.ranks, default=1))
        one, packed = read_trace(files[0]), files[0].stat().st_size
        size = one.text_bytes / 1e6
        print(f"per rank: {len(one.events):,} events, {size:.1f} MB, {packed / 1e6:.1f} MB packed")
        python = "" if given.alone or not given.ranks else peer(folder / "venv", given.hta)
        peaks = {ranks: one_size(ranks, files, folder, size, python).peak for ranks in given.ranks}
        if {8, 64} <= peaks.keys():
            print(f"memory at 64 ranks is {peaks[64] / peaks[8]:.2f} times that at 8 (bar {MORE_RANKS})")
        if given.bytes:
            large(write_ranks(folder / "traces", int(np.ceil(given.bytes / 1e6 / size))), folder, size)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
