"""Runs under each launcher, signals to any of their processes, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.base.processes import state_of
from meshwright.run.folder.checkpoint.checkpoint import latest
from tests.conftest import ROOT
from tests.launchers import fake_slurm

WAIT = 10  # seconds that a rank may let others wait, in these runs
PLAN = {
    "model": "tiny-llama", "cluster": "2x1xcpu", "global_batch": 4, "seq_len": 32, "precision": "fp32",
    "micro_batches": 2, "dp": 2,
}  # fmt: skip
_RAY_LOGS = Path(tempfile.gettempdir()) / "ray/session_latest/logs"
_OPTIONS = ["--steps", "100000", "-o", "run", "--wait", str(WAIT)]


@dataclass
class Running:
    """A run of two ranks: its launchers (more than one under torchrun), and every other process by what it is."""

    folder: Path
    launchers: list[subprocess.Popen[str]]
    find: Callable[[], dict[str, int]]  # processes by their part: launcher, agent, first, last
    parts: dict[str, int] = field(default_factory=dict)
    family: set[int] = field(default_factory=set)
    silent: bool = False  # whoever manages the ranks may end them before they speak

    def begin(self) -> None:
        """Wait for two steps, and note all processes."""
        until("two steps", lambda: len(steps_in(self.folder / "run")) >= 2, 120)
        time.sleep(2.5)  # two heartbeats
        self.parts = self.find()
        for launcher in [*(one.pid for one in self.launchers), *self.parts.values()]:
            self.family |= {launcher, *descendants(launcher)}

    def send(self, number: int, part: str) -> None:
        os.kill(self.parts[part], number)

    def gone(self, seconds: float) -> float:
        """Return after how many seconds all processes were gone."""
        begun = time.monotonic()
        ended = lambda: all(state_of(pid) in ("", "Z") for pid in self.family)  # noqa: E731
        until("the end of all processes", ended, seconds)
        return time.monotonic() - begun

    def codes(self) -> list[int]:
        """Return how the launchers ended."""
        return [launcher.wait(timeout=10) for launcher in self.launchers]

    def messages(self) -> list[str]:
        """Return the lines that say why the run ended, of all launchers and logs together."""
        actors = [path for pid in self.parts.values() for path in _RAY_LOGS.glob(f"worker-*-{pid}.err")]
        files = [*self.folder.glob("*.err"), *self.folder.glob("run/logs/*"), *actors]
        text = "\n".join(path.read_text() for path in files)
        return [line for line in text.splitlines() if line.startswith("error: ") or ": stopping after" in line]

    def saved(self) -> int:
        """Return the step of the newest whole checkpoint; 0 if there is none."""
        found, _ = latest(self.folder / "run/checkpoints")
        return found.step if found else 0


def steps_in(run: Path) -> list[int]:
    """Return the steps that a run has written; the last line may be cut."""
    found = []
    for line in (run / "events.jsonl").read_text().splitlines() if (run / "events.jsonl").exists() else []:
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            found += [event["step"]] if event["event"] == "step" else []
    return found


def until(what: str, found: Callable[[], object], seconds: float) -> None:
    """Wait for something that a run does."""
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, f"{what}: not in {seconds} s"
        time.sleep(0.05)


def table() -> dict[int, int]:
    """Return the parent of every process."""
    rows = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout.split("\n")
    return {int(pid): int(parent) for pid, parent in (row.split() for row in rows if row.strip())}


def _says(pid: int, word: str) -> bool:
    return word in Path(f"/proc/{pid}/cmdline").read_text()


def descendants(pid: int) -> set[int]:
    parents, found, new = table(), set[int](), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def ranks_of(launcher: int) -> list[int]:
    """Return the processes that train, by their rank."""
    found = {}
    for pid in descendants(launcher):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_text().split("\0")
            names = dict(word.split("=", 1) for word in words if "=" in word)
            if "RANK" in names and "\0-m\0meshwright\0train" in Path(f"/proc/{pid}/cmdline").read_text():
                found[int(names["RANK"])] = pid
    return [found[rank] for rank in sorted(found)]


def environment() -> dict[str, str]:
    path = f"{ROOT / 'src'}{os.pathsep}{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def started(folder: Path, name: str, *command: str, **variables: str) -> subprocess.Popen[str]:
    """Start a launcher in a session of its own, so that all that is left of it can be killed."""
    with (folder / f"{name}.err").open("w") as err, (folder / f"{name}.out").open("w") as out:
        environ = environment() | variables
        return subprocess.Popen(
            command, cwd=folder, stdout=out, stderr=err, text=True, env=environ, start_new_session=True
        )


@contextlib.contextmanager
def local(folder: Path) -> Iterator[Running]:
    """`meshwright train` on this machine."""
    (folder / "plan.json").write_text(json.dumps(PLAN))
    one = started(folder, "local", sys.executable, "-m", "meshwright", "train", "--plan", "plan.json", *_OPTIONS)

    def find() -> dict[str, int]:
        parents = table()
        (server,) = (pid for pid, parent in parents.items() if parent == one.pid and _says(pid, "forkserver"))
        first, last = sorted(pid for pid, parent in parents.items() if parent == server)
        return {"launcher": one.pid, "first": first, "last": last}

    with _killed_at_the_end(Running(folder, [one], find)) as running:
        yield running


@contextlib.contextmanager
def torchrun(folder: Path) -> Iterator[Running]:
    """Two agents of one rank each, as `meshwright launch --on torchrun` prints them."""
    (folder / "plan.json").write_text(json.dumps(PLAN))
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port = opened.getsockname()[1]
    command = [sys.executable, "-m", "meshwright", "launch", "plan.json", "--on", "torchrun", "--address"]
    printed = subprocess.run(
        [*command, f"127.0.0.1:{port}", *_OPTIONS],
        cwd=folder, env=environment(), capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    lines = [shlex.split(line) for line in printed.splitlines() if not line.startswith("#")]
    agents = [started(folder, f"agent-{i}", sys.executable, *words[1:]) for i, words in enumerate(lines)]

    def find() -> dict[str, int]:
        (first,), (last,) = (ranks_of(agent.pid) for agent in agents)
        return {"launcher": agents[0].pid, "agent": agents[1].pid, "first": first, "last": last}

    with _killed_at_the_end(Running(folder, agents, find)) as running:
        yield running


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Running]:
    """Slurm's stand-in; the launcher is its batch shell."""
    (folder / "plan.json").write_text(json.dumps(PLAN))
    tools, state = folder / "bin", folder / "state"
    for path in (tools, state):
        path.mkdir()
    fake_slurm.install(tools)
    one = started(
        folder, "launch", sys.executable, "-m", "meshwright", "launch", "plan.json", "--on", "slurm", *_OPTIONS,
        FAKE_SLURM=str(state), PATH=f"{tools}{os.pathsep}{os.environ['PATH']}",
    )  # fmt: skip
    assert one.wait(timeout=60) == 0, (folder / "launch.err").read_text()

    def find() -> dict[str, int]:
        shell = int((state / "shell").read_text())
        first, last = (int(pid) for pid in (state / "tasks").read_text().split())
        return {"launcher": shell, "first": first, "last": last}

    running = Running(folder, [], find)
    with _killed_at_the_end(running):
        yield running


@contextlib.contextmanager
def ray(folder: Path, address: str) -> Iterator[Running]:
    """A driver beside a cluster of two nodes, which are processes of this machine."""
    (folder / "plan.json").write_text(json.dumps(PLAN))
    command = [sys.executable, "-m", "meshwright", "launch", "plan.json", "--on", "ray", "--address", address]
    one = started(folder, "driver", *command, *(os.path.abspath(folder / "run") if o == "run" else o for o in _OPTIONS))

    def find() -> dict[str, int]:
        rows = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
        actors = [int(row.split()[0]) for row in rows.splitlines() if "ray::Rank" in row]
        by_rank = {_rank_of(folder / "run", pid): pid for pid in actors}  # there may be actors of others
        return {"launcher": one.pid, "first": by_rank[0], "last": by_rank[1]}

    with _killed_at_the_end(Running(folder, [one], find, silent=True)) as running:
        yield running


def _rank_of(run: Path, pid: int) -> int:
    """Return the rank of a process, by the events file that it holds open."""
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            match = re.fullmatch(rf"{re.escape(str(run))}/events-?(\d*)\.jsonl", os.readlink(descriptor))
            if match:
                return int(match[1] or 0)
    return -1


@contextlib.contextmanager
def _killed_at_the_end(running: Running) -> Iterator[Running]:
    try:
        yield running
    finally:
        left = set(running.family)
        for launcher in running.launchers:
            left |= {launcher.pid, *descendants(launcher.pid)}
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for launcher in running.launchers:
            launcher.wait()
