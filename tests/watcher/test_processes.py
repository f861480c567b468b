"""Several processes: a stream each, read as one; where two of them part ways."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright
from meshwright.errors import InputError
from meshwright.watcher.events.compare import compare, lines_of
from meshwright.watcher.events.events import Event, find, merged, read
from meshwright.watcher.events.perfetto import trace_of
from tests.conftest import Run
from tests.watcher import subjects
from tests.watcher.seen import short


class Trainer:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.loss = 4.0

    def step(self, number: int) -> None:
        self.loss /= 2
        if self.rank == 1 and number == 2:
            self.skip()
        else:
            self.sync()

    def sync(self) -> None:
        self.loss += 0.0

    def skip(self) -> None:
        self.loss = 9.0


def train(rank: int) -> None:
    trainer = Trainer(rank)
    for number in range(4):
        trainer.step(number)


def rank_of(rank: int, output: str) -> None:
    os.environ["RANK"] = str(rank)
    with meshwright.watch(Trainer, attributes=["loss"], output=output):
        train(rank)


@pytest.fixture
def streams(tmp_path: Path) -> str:
    """Two ranks, started at the same time, one of which goes its own way in its third step."""
    name = str(tmp_path / "run")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=rank_of, args=(rank, name)) for rank in range(2)]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
    assert [one.exitcode for one in processes] == [0, 0]
    return name


def test_two_ranks_part_ways_where_it_was_planted(streams: str) -> None:
    """Faults 6 and 9: a stream per rank, all ranks by default, each event with time and rank."""
    assert [Path(path).name for path in find([streams])] == ["run.rank0.jsonl", "run.rank1.jsonl"]
    events = merged(find([streams]))
    assert {one.rank for one in events} == {0, 1}
    assert [one.time for one in events] == sorted(one.time for one in events)
    found = compare(events, 0, 1)
    assert found.flow is not None
    assert (found.flow.left.name, found.flow.right.name) == ("Trainer.sync", "Trainer.skip")  # type: ignore[union-attr]
    assert found.flow.path == ("Trainer.step",)
    assert found.calls == 1 + 2 + 2 + 1  # __init__, two steps with their sync, the third step
    assert found.values == ()  # until then both had the same losses
    assert not found.same
    assert any("part ways after 6 equal calls, inside Trainer.step" in line for line in lines_of(found))


def test_the_same_ranks_do_the_same(streams: str) -> None:
    events = read(f"{streams}.rank0.jsonl")
    other = [Event(**{**json.loads(json.dumps(_facts(one))), "rank": 1, "time": one.time + 5000}) for one in events]
    assert compare([*events, *other], 0, 1).same
    with pytest.raises(InputError, match="no rank 7"):
        compare(events, 0, 7)


def _facts(event: Event) -> dict[str, object]:
    return {name: getattr(event, name) for name in Event.__struct_fields__}


def test_values_that_differ_are_named(streams: str) -> None:
    events = read(f"{streams}.rank0.jsonl")
    other = [Event(**{**_facts(one), "rank": 1}) for one in events]  # type: ignore[arg-type]
    changed = [one for one in other if one.event == "set"][2]
    changed.new = "0.123"
    found = compare([*events, *other], 0, 1)
    assert found.flow is None
    assert [(left.new, right.new) for left, right in found.values if left and right] == [("1.0", "0.123")]


def test_addresses_do_not_count() -> None:
    def event(rank: int, text: str) -> list[Event]:
        return [
            Event("run", 1 + rank, rank, "MainThread", 0, "f", text=text),
            Event("end", 9, rank, "MainThread", 0, "f"),
        ]

    assert compare([*event(0, "<X at 0x7f12>"), *event(1, "<X at 0x7fff>")], 0, 1).same
    assert not compare([*event(0, "<X at 0x7f12>"), *event(1, "<Y at 0x7f12>")], 0, 1).same


def test_a_rank_that_stops_early(streams: str) -> None:
    events = read(f"{streams}.rank0.jsonl")
    other = [Event(**{**_facts(one), "rank": 1}) for one in events[:-6]]  # type: ignore[arg-type]
    found = compare([*events, *other], 0, 1)
    assert found.flow is not None
    assert found.flow.right is None


def test_chrome_trace(streams: str) -> None:
    rows = json.loads(trace_of(merged(find([streams]))))["traceEvents"]
    for rank in range(2):
        mine = [row for row in rows if row["pid"] == rank]
        assert sum(row["ph"] == "B" for row in mine) == sum(row["ph"] == "E" for row in mine) == 9
        open_: list[str] = []
        for row in mine:
            if row["ph"] == "B":
                open_.append(row["name"])
            elif row["ph"] == "E":
                assert open_.pop() == row["name"]
    assert {row["args"]["name"] for row in rows if row["name"] == "process_name"} == {"rank 0", "rank 1"}


STARTS = """
import multiprocessing, sys

def work(n):
    return 1 if n < 2 else work(n - 1)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    work(1)
    children = [context.Process(target=work, args=(n,)) for n in (2, 3)]
    for one in children:
        one.start()
    for one in children:
        one.join()
"""


@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver"])
def test_children_are_watched_as_their_parent_is(tmp_path: Path, meshwright: Run, way: str) -> None:
    """The children are ranks 0 and 1; who only started them is none."""
    (tmp_path / "starts.py").write_text(STARTS)
    done = meshwright("watch", "starts.py", "-o", "run", "--", way)
    assert done.returncode == 0, done.stderr
    events = merged(find([str(tmp_path / "run")]))
    runs = {
        rank: sum(one.event == "run" for one in events if one.rank == rank) for rank in {one.rank for one in events}
    }
    assert runs == {-1: 1, 0: 2, 1: 3}


def test_helpers_of_a_rank_belong_to_it(tmp_path: Path, meshwright: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    (tmp_path / "starts.py").write_text(STARTS)
    assert meshwright("watch", "starts.py", "-o", "run", "--", "fork").returncode == 0
    events = merged(find([str(tmp_path / "run")]))
    assert {one.rank for one in events} == {5}
    assert {one.thread for one in events} == {"", "MainThread", "ForkProcess-1/MainThread", "ForkProcess-2/MainThread"}


LOADS = """
import sys
from torch.utils.data import DataLoader

class Data:
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return i

def step(batch):
    return batch

if __name__ == "__main__":
    for batch in DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context=sys.argv[1]):
        step(batch)
"""


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_loaders_of_data_are_no_ranks(tmp_path: Path, meshwright: Run, way: str) -> None:
    """Nobody says a rank here: the trainer is rank 0, and its loaders write beside it."""
    (tmp_path / "loads.py").write_text(LOADS)
    done = meshwright("watch", "loads.py", "-o", "run", "--", way)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("run.rank0.pid*.jsonl"))) == 2
    own = read(str(tmp_path / "run.rank0.jsonl"))
    assert [one.name for one in own if one.event == "run"][-2:] == ["step", "step"]
    events = merged(find([str(tmp_path / "run")]))
    assert {one.rank for one in events} == {0}
    loads = {one.thread.partition("/")[0] for one in events if one.name == "Data.__getitem__"}
    assert loads == {f"{way.capitalize()}Process-{number}" for number in (1, 2)}


def test_only_the_ranks_that_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1, 3):
        monkeypatch.setenv("RANK", str(rank))
        with meshwright.watch(subjects.factorial, ranks=[0, 3], output=tmp_path / "run"):
            code = subjects.factorial.__code__
            subjects.factorial(1)
        assert (rank == 1) == (code is subjects.factorial.__code__) or sys.version_info >= (3, 12)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.rank0.jsonl", "run.rank3.jsonl"]
    assert {one.rank for one in read(str(tmp_path / "run.rank3.jsonl"))} == {3}


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise RuntimeError('over')", "subjects.factorial('x')", "pass"])
def test_nothing_is_lost_at_the_end(tmp_path: Path, end: str) -> None:
    code = f"""
import sys, meshwright
from tests.conftest import Run
from tests.watcher import subjects
watch = meshwright.watch(subjects.factorial, output={str(tmp_path / "run")!r}).start()
for _ in range(1000):
    subjects.factorial(2)
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == {"sys.exit(3)": 3, "pass": 0}.get(end, 1)
    events = read(str(tmp_path / "run.rank0.jsonl"))
    assert len([one for one in events if one.event == "end"]) == 2000
    assert events[-1].event == "stop"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_does_not_end_the_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.rank0.jsonl").symlink_to("/dev/full")
    with meshwright.watch(subjects.factorial, output=tmp_path / "run"):
        assert subjects.factorial(3) == 6
    assert f"the watch ends here: {tmp_path / 'run'}: No space left" in capfd.readouterr().err
    assert subjects.factorial(3) == 6


def test_a_stream_that_was_cut_off_is_read(tmp_path: Path, streams: str) -> None:
    whole = Path(f"{streams}.rank0.jsonl").read_bytes()
    cut = tmp_path / "cut.rank0.jsonl"
    cut.write_bytes(whole[:-20])
    assert len(read(str(cut))) == len(whole.splitlines()) - 1
    cut.write_bytes(b"nonsense\n" + whole)
    with pytest.raises(InputError, match="no event"):
        read(str(cut))
    cut.write_bytes(b"")
    with pytest.raises(InputError, match="no events"):
        read(str(cut))


def test_depth_and_indent_survive_merging(streams: str) -> None:
    own = short([one for one in merged(find([streams])) if one.rank == 0])
    assert own == short(read(f"{streams}.rank0.jsonl"))


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("rank=0", "rank=1", True), ("local_rank=0, n=4", "local_rank=1, n=4", True), ("rank=0", "rank=0", True),
        ("rank=2", "rank=3", False), ("n=0", "n=1", False), ("x=Tensor[2] cuda:0 v0", "x=Tensor[2] cuda:1 v0", True),
        ("x=Tensor[2] cuda:0 v0", "x=Tensor[2] cpu v0", False),
    ],
)  # fmt: skip
def test_what_must_differ_is_no_difference(left: str, right: str, same: bool) -> None:
    events = [Event("run", 5, rank, "MainThread", 0, "step", text=text) for rank, text in enumerate((left, right))]
    assert compare(events, 0, 1).same == same


@pytest.mark.parametrize(("name", "same"), [("Trainer.rank", True), ("Trainer.count", False)])
def test_the_attribute_that_holds_the_rank(name: str, same: bool) -> None:
    events = [Event("set", 5, rank, "MainThread", 0, name, new=str(rank)) for rank in (0, 1)]
    assert compare(events, 0, 1).same == same
