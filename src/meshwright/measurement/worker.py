"""Run all measurements: on this machine alone, on its devices together, or on nodes that a launcher has joined."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import multiprocessing

from meshwright.base.files import read_json, write_text
from meshwright.base.processes import script_left_alone
from meshwright.clusters import Cluster
from meshwright.clusters.detect import detect
from meshwright.clusters.parsing import VERSION
from meshwright.errors import InputError, MeshwrightError
from meshwright.measurement import links
from meshwright.measurement.layers import Compared, beside_kernels, compare
from meshwright.measurement.profile import device_table, link_tables, measurements, noise, slower
from meshwright.measurement.progress import bar
from meshwright.measurement.samples import Sample
from meshwright.measurement.timing import Timing, share_of_a_core
from meshwright.plans import Job
from meshwright.run.memory.host_memory import keep_freed_memory
from meshwright.run.processes.launch import free_port, joined_from_outside
from meshwright.run.processes.threads import share_cores
from meshwright.run.torch_private import grow_segments

# Samples so far are kept in a file: an interrupted run goes on where it stopped.


@dataclass
class State:
    """Samples of one machine, by measurement."""

    path: Path
    machine: dict[str, Any]  # facts of the machine; samples are reused only if these are equal
    done: dict[str, list[Sample]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # warnings of measurements that are noisy or incomplete

    @staticmethod
    def load(path: Path, machine: dict[str, Any]) -> State:
        """Read the samples of an earlier run, if it was on the same machine."""
        if not path.exists():
            return State(path, machine)
        table = read_json(path)
        if not isinstance(table, dict) or not isinstance(table.get("done"), dict):
            raise InputError("does not hold measurements", file=str(path), valid="delete it to begin anew")
        if table.get("machine") != machine:
            return State(path, machine)
        done = {name: [_sample(row) for row in rows] for name, rows in table["done"].items()}
        return State(path, machine, done, dict(table.get("notes", {})))

    def add(self, name: str, samples: Iterable[Sample], note: str = "") -> None:
        """Keep the samples of a measurement, with a note on what is uncertain about them."""
        self.done[name] = list(samples)
        if note:
            self.notes[name] = note
        rows = {key: [_row(sample) for sample in found] for key, found in self.done.items()}
        table = {"machine": self.machine, "done": rows, "notes": self.notes}
        write_text(self.path, json.dumps(table, indent=1) + "\n")

    def forget(self) -> None:
        """Delete the file; called once the cluster file is written."""
        self.path.unlink(missing_ok=True)


def _row(sample: Sample) -> dict[str, Any]:
    return {"kind": sample.kind, **sample.facts, "seconds": sample.timing.seconds, "spread": sample.timing.spread}


def _sample(row: dict[str, Any]) -> Sample:
    facts = {key: float(value) for key, value in row.items() if key not in {"kind", "seconds", "spread"}}
    return Sample(str(row["kind"]), facts, Timing(float(row["seconds"]), float(row["spread"])))


_TRIES = 3  # tries of a measurement whose samples are noise
_BUDGET = 90.0  # seconds of a measurement with all its tries: an idle machine needs a third
_WAIT = timedelta(seconds=300)  # seconds to wait for a process at a meeting: longer than one timing on any machine
_BUSY = 0.8  # minimum share of a core that a process should get
T = TypeVar("T")
Tell = Callable[[str, int, int], None]  # name of the measurement, work done, work in all


def measure(output: str, devices: int = 0, tell: Tell = lambda name, done, of: None) -> Cluster | None:
    """Measure, write a cluster file, and return the cluster in the process that wrote it.

    What was measured before an interruption is in `OUTPUT.partial.json`, and is not measured again.
    """
    if joined_from_outside():
        return _work(output, int(os.environ["WORLD_SIZE"]), tell)
    world = detect(devices).cluster.devices
    if world == 1:
        return _work(output, 1, tell)
    return _started(output, world)


def compared(job: Job, tell: Callable[[str], None]) -> list[Compared]:
    """Compare the layers of a model on this machine's first device."""
    if torch.cuda.is_available():
        return list(compare(job, "cuda:0", tell))
    share_cores(1)
    return list(compare(job, "cpu", tell))


def _started(output: str, world: int) -> Cluster:
    """Start one process per device of this machine, and return the cluster."""
    failed = Path(f"{output}.error")
    failed.unlink(missing_ok=True)
    try:
        with script_left_alone():
            started = multiprocessing.spawn(_entry, (output, world, free_port()), nprocs=world, join=False)
        while not started.join():
            pass
    except multiprocessing.ProcessExitedException:
        if not failed.exists():
            raise
        said = failed.read_text("utf-8")
        failed.unlink()
        raise MeasuringFailed(said) from None
    return Cluster.from_toml(output)


def _entry(rank: int, output: str, world: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    with bar() as tell:
        try:
            _work(output, world, tell)
        except MeshwrightError as error:
            if rank == 0:
                Path(f"{output}.error").write_text(str(error), "utf-8")
            with suppress(Exception):
                dist.destroy_process_group()
            sys.exit(1)


class MeasuringFailed(MeshwrightError):
    """Error in a process of the measurement, raised again by the process that started it."""

    exit_code = 1


@dataclass(frozen=True)
class _Here:
    """One rank with its device, node and machine."""

    rank: int
    device: str
    host: str
    group: dict[str, Any]  # the node's devices, as a cluster file writes them


def _work(output: str, world: int, tell: Tell) -> Cluster | None:
    here = _join(world)
    everyone = _gathered(here, world)
    names = list(dict.fromkeys(one.host for one in everyone))
    tiers = links.tiers([names.index(one.host) for one in everyone]) if world > 1 else []
    kinds = [str(one.group["device"]) for one in everyone]
    machine = {"devices": kinds, "nodes": len(names), "torch": torch.__version__, "cores": os.cpu_count()}
    machine["threads"] = torch.get_num_threads()  # samples with other thread counts cannot be reused
    state = State.load(Path(f"{output}.partial.json"), machine) if here.rank == 0 else None
    plan = measurements(here.device, tiers)
    _warn_if_busy(here, everyone, world)
    for done, one in enumerate(plan):
        tell(one.name, done, len(plan))
        known = _said([all(f"{one.name} @ {kind}" in state.done for kind in kinds)] if state else None, world)
        if not known[0]:
            _measured(one.name, one.run, kinds, state, world)
    tell("done", len(plan), len(plan))
    found = None
    if state is not None:
        found = _written(output, here, everyone, state)
        state.forget()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    return found


def _warn_if_busy(here: _Here, everyone: Sequence[_Here], world: int) -> None:
    """Warn if other programs compute here: timings will be noisy, and measurements may run out of time."""
    fair = min(1.0, (os.cpu_count() or 1) / sum(one.host == here.host for one in everyone))
    least = min(_gathered(share_of_a_core() / fair, world))
    if least < _BUSY and here.rank == 0:
        print(f"note: this machine is busy: a process gets {least:.0%} of its part of the cores", file=sys.stderr)  # noqa: T201


def _join(world: int) -> _Here:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    workers = 0  # of a node whose ranks run on its CPU
    if device == "cpu":
        keep_freed_memory()
        workers = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        share_cores(workers)
    else:
        torch.cuda.set_device(device)
        grow_segments()
    if world > 1:
        dist.init_process_group("nccl" if device != "cpu" else "gloo", timeout=_WAIT)
    (group,) = detect(workers).table["group"]
    # Nodes may share a name, as containers often do, so launchers number them.
    host = f"{os.environ.get('GROUP_RANK', '')} {socket.gethostname()}"
    return _Here(dist.get_rank() if world > 1 else 0, device, host, group)


def _gathered(mine: T, world: int) -> list[T]:
    """Return every rank's value, in the order of ranks."""
    if world == 1:
        return [mine]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    return everyone


def _said(what: list[Any] | None, world: int) -> list[Any]:
    """Broadcast a value from the first rank."""
    said = what or [None]
    if world > 1:
        dist.broadcast_object_list(said)
    return said


def _measured(name: str, run: Callable[[], Any], kinds: Sequence[str], state: State | None, world: int) -> None:
    """Run one measurement on all devices at once, and again if it is noisy and there is time.

    The first rank keeps the first quiet try, else the first one with a note on what is uncertain about it.
    """
    limit, best = time.monotonic() + _BUDGET, None
    for _ in range(_TRIES):
        own, whole = _until(run(), limit, world)
        every = _gathered(own, world)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        found = {kind: _combined([s for s, k in zip(every, kinds, strict=True) if k == kind]) for kind in set(kinds)}
        bad = [text for samples in found.values() if (text := noise(name, samples))]
        note = "; ".join([*bad, *([] if whole else [f"{len(own)} timings fitted into {_BUDGET:.0f} s"])])
        if best is None or (whole and not bad):
            best = found, note
        if not bad or _said([time.monotonic() > limit], world)[0]:
            break
    assert best is not None
    for kind, samples in best[0].items() if state else ():
        state.add(f"{name} @ {kind}", samples, best[1])  # type: ignore[union-attr]


def _until(samples: Iterable[Sample], limit: float, world: int) -> tuple[list[Sample], bool]:
    """Take samples until the first rank's clock reaches the limit; return them, and True if they are complete."""
    found: list[Sample] = []
    for sample in samples:
        found.append(sample)
        if _said([time.monotonic() > limit], world)[0]:
            return found, False
    return found, True


def _combined(every: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return the median sample over devices of one kind."""
    found = []
    for same in zip(*every, strict=True):
        seconds = statistics.median(sample.timing.seconds for sample in same)
        spread = statistics.median(sample.timing.spread for sample in same)
        found.append(Sample(same[0].kind, same[0].facts, Timing(seconds, spread)))
    return found


def _written(output: str, here: _Here, everyone: Sequence[_Here], state: State) -> Cluster:
    import tomli_w

    from meshwright.base.files import write_text

    groups: list[dict[str, Any]] = []
    how = f"{date.today().isoformat()}, torch {torch.__version__}"
    if state.notes:
        how += "; uncertain: " + "; ".join(f"{name.partition(' @ ')[0]}: {note}" for name, note in state.notes.items())
    by_host = {one.host: one.group for one in everyone}
    for row in by_host.values():
        if groups and groups[-1] | {"nodes": 1} == row:
            groups[-1]["nodes"] += 1
        else:
            groups.append(dict(row))
    for row in groups:
        kind = str(row["device"])
        found = {name.removesuffix(f" @ {kind}"): s for name, s in state.done.items() if name.endswith(f" @ {kind}")}
        (plain,) = Cluster.from_table({"group": [row]}).groups
        row["measured"] = device_table(found, here.device, how)
        if (seen := found.get("blocks")) and "product" in row["measured"]:
            priced = Cluster.from_table({"group": [row]})
            row["measured"] = slower(row["measured"], beside_kernels(seen, priced, here.device))
        row["link"] = link_tables(plain.links, found)
    table = {"version": VERSION, "name": platform.node() or "this machine", "group": groups}
    cluster = Cluster.from_table(table, file=output)
    write_text(output, tomli_w.dumps(table))
    return cluster
