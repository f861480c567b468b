"""From files to an analysis: which files count, who reads them, and what is told of those that do not."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshwright as mw
from meshwright.plans import Plan
from meshwright.traces import gather_ranks
from meshwright.traces.find_traces import sources
from meshwright.traces.page.document import document
from meshwright.traces.page.html import read_ranks
from meshwright.traces.page.perfetto import merged
from meshwright.traces.page.sql import ask
from meshwright.traces.page.terminal import lines, notes
from meshwright.traces.page.window import interesting
from tests.conftest import ROOT, Run

TRACES = ROOT / "tests/data/traces"
DLRM = TRACES / "param/dlrm_8rank"


@pytest.fixture(scope="module")
def dlrm() -> Any:
    return mw.analyze(DLRM, cache=False)


def small(rank: int | None, kernels: list[tuple[float, float]], **more: Any) -> str:
    events = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": "gemm",
            "pid": 0,
            "tid": 7,
            "ts": ts,
            "dur": dur,
            "args": {"correlation": n},
        }
        for n, (ts, dur) in enumerate(kernels)
    ]
    info = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 4}}
    return json.dumps({**info, **more, "traceEvents": events})


def test_files_are_found_in_folders_and_counted_as_people_count(tmp_path: Path) -> None:
    for name in (
        "rank10.json",
        "rank2.json.gz",
        "deep/rank1.json.zst",
        "notes.txt",
        "rank2.json.gz.meshwright/events.parquet",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    names = [file.name for file in sources(tmp_path).traces]
    assert names == ["rank1.json.zst", "rank2.json.gz", "rank10.json"]
    assert sources([tmp_path / "notes.txt"]).traces == (tmp_path / "notes.txt",)  # what is named is tried


def test_broken_double_and_nameless_files_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(small(0, [(0, 5)]))
    (tmp_path / "b.json").write_text(small(0, [(900, 7)]))
    (tmp_path / "c.json").write_text(small(None, [(0, 5)]))
    (tmp_path / "config.json").write_text('{"model": "llama"}')
    (tmp_path / "empty.json").touch()
    (tmp_path / "torn.json.gz").write_bytes(gzip.compress(small(1, [(0, 5)] * 50).encode())[:-40])
    found = mw.analyze(tmp_path, cache=False)
    assert [facts.rank for facts in found.ranks] == [0, 1, 2]
    assert {Path(one.path).name: one.why.split(" (valid")[0] for one in found.broken} == {
        "config.json": "has no traceEvents",
        "empty.json": "is empty",
    }
    told = "\n".join(notes(found))
    assert f"left out: {tmp_path}/a.json: {tmp_path}/b.json is of rank 0 too; the later recording is taken" in told
    assert "c.json does not tell its rank: taken as 2" in told
    assert "skipped" in told
    assert "the packed data is cut off" in told or "ends in the middle" in told


@pytest.mark.parametrize("rank", [-3, 1e30, "x"])
def test_a_rank_that_is_none_is_told(rank: object, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(small(None, [(0, 5)], distributedInfo={"rank": rank}))
    found = mw.analyze(tmp_path, cache=False)
    assert found.ranks[0].rank == 0
    assert f"rank 0: distributedInfo tells no rank, but {rank!r}" in list(notes(found))


def test_nothing_to_read_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(mw.InputError, match="holds no traces"):
        mw.analyze(tmp_path)
    with pytest.raises(mw.InputError, match="no such file or folder"):
        mw.analyze(tmp_path / "nowhere")
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(mw.InputError, match=r"x\.json: is a list, but has no events"):
        mw.analyze(tmp_path)
    with pytest.raises(mw.InputError, match="workers: is 0"):
        mw.analyze(DLRM, workers=0)


def test_processes_find_what_one_process_finds(dlrm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_ranks, "FEW", 0)
    done: list[tuple[int, int]] = []
    again = mw.analyze(DLRM, workers=2, cache=False, tell=lambda *now: done.append(now))
    assert document(again) == document(dlrm)
    assert done == [(number, 8) for number in range(1, 9)]


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    """Processes that read must not run the user's script again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import meshwright as mw\nfrom meshwright.traces import gather_ranks as gathering\ngathering.FEW = 0\n"
        f"print('ranks', len(mw.analyze({str(DLRM)!r}, workers=2, cache=False).ranks), __file__)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == (f"ranks 8 {script}\n", "")


def killing(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    """`meshwright analyze` whose processes are ended while they read."""
    code = (
        "from meshwright.traces import gather_ranks as gathering\nfrom tests.traces import killed\n"
        f"gathering.FEW, gathering.facts_of = 0, killed.{how}\n"
        "from meshwright.cli import main\nmain()\n"
    )
    command = [sys.executable, "-c", code, "analyze", str(folder), "--workers", "2", "--no-cache", "--json"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


def test_a_file_whose_reader_is_ended_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    for rank in range(6):
        name = f"large{rank}.json" if rank in (1, 4) else f"rank{rank}.json"
        (tmp_path / name).write_text(small(rank, [(0, 5), (9, 3)]))
    done = killing(tmp_path, "by_its_file")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 2, 3, 5]
    told = {Path(one["path"]).name: one["why"] for one in found["skipped"]}
    assert told == dict.fromkeys(
        ["large1.json", "large4.json"], "the process that read it was ended: was it out of memory?"
    )


def test_a_reader_that_is_ended_once_costs_nothing(tmp_path: Path) -> None:
    for rank in range(6):
        (tmp_path / f"rank{rank}.json").write_text(small(rank, [(0, 5), (9, 3)]))
    done = killing(tmp_path, "once")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert [rank["rank"] for rank in found["ranks"]] == list(range(6))
    assert found["skipped"] == []


def test_where_every_reader_is_ended_the_error_says_so(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"large{rank}.json").write_text(small(rank, [(0, 5)]))
    done = killing(tmp_path, "by_its_file")
    assert done.returncode == 2
    assert "large0.json: the process that read it was ended: was it out of memory?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_analysis_comes_from_parquet_and_is_the_same(tmp_path: Path, dlrm: Any) -> None:
    for file in DLRM.iterdir():
        shutil.copy(file, tmp_path)
    first = document(mw.analyze(tmp_path))
    kept = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert len(kept) == 8
    assert document(mw.analyze(tmp_path)) == first
    assert first["shares"] == document(dlrm)["shares"]


def test_every_rank_adds_up_to_its_steps(dlrm: Any) -> None:
    parts = ("compute", "transfer", "waiting", "bubble", "copies", "host_bound", "idle")
    for rank in document(dlrm)["ranks"]:
        for step, length in enumerate(rank["steps"]["length"]):
            assert sum(rank["steps"][name][step] for name in parts) == length
    assert sum(document(dlrm)["shares"].values()) == pytest.approx(1)


def test_sql_counts_as_python_does(dlrm: Any) -> None:
    file = DLRM / "worker3_step_12.1694128201557.pt.trace.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    answer = ask(dlrm, "select count(*), sum(dur) from events where rank = 3 and category = 'kernel'")
    assert answer.rows == ((len(kernels), 1000 * sum(event["dur"] for event in kernels)),)
    assert ask(dlrm, "select count(distinct rank) from calls").rows == ((8,),)
    steps = ask(
        dlrm, "select sum(length - compute - transfer - waiting - bubble - copies - host_bound - idle) from steps"
    )
    assert steps.rows == ((0,),)
    with pytest.raises(mw.InputError, match=r"--sql: .*nonsense"):
        ask(dlrm, "select nonsense from events")


def test_the_window_holds_a_step_of_every_chosen_rank(dlrm: Any) -> None:
    window = interesting(dlrm)
    assert window is not None
    assert window.ranks == tuple(range(8))
    text = json.loads(merged(read_ranks(dlrm, window.ranks, cache=False), window, {}))
    spans = [event for event in text["traceEvents"] if event["ph"] == "X"]
    length = (window.end - window.start) / 1e3
    assert {event["pid"] for event in spans} == set(range(8))
    assert all(event["ts"] < length and event["ts"] + event["dur"] > 0 for event in spans)
    kernels = sum(event["cat"] == "kernel" for event in spans)
    assert kernels == sum(kernel.count for facts in dlrm.ranks for kernel in facts.kernels)  # one step: all of it
    begun = {event["id"] for event in text["traceEvents"] if event["ph"] == "s"}
    assert begun
    assert begun == {event["id"] for event in text["traceEvents"] if event["ph"] == "f"}


def test_the_summary_reads_like_a_diagnosis(dlrm: Any) -> None:
    text = "\n".join(lines(dlrm))
    assert text.startswith("ranks 0-7, 1 step, Tesla V100-SXM2-32GB")
    assert "devices idle because the host has not issued what comes next" in text
    assert re.search(
        r"all-to-all of 8 ranks for others to arrive; rank 7 causes \d+ % of it, the last in 4 of 5 calls", text
    )


def test_last_arrivals_are_those_of_the_traces(dlrm: Any) -> None:
    """By hand: of the k-th communication kernel of every rank, the one that starts last."""
    starts = []
    for file in sorted(DLRM.iterdir()):
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        mine = [e["ts"] for e in events if e.get("cat") == "kernel" and e["name"].startswith("nccl")]
        starts.append(sorted(mine))
    last = np.bincount(np.argmax(np.array(starts), axis=0), minlength=8)
    late = dlrm.across.aligned.late
    assert np.bincount(late[late >= 0], minlength=8).tolist() == last.tolist()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    shutil.copy(TRACES / "hta/triton_example.json.gz", tmp_path)
    (tmp_path / "triton_example.json.gz.meshwright").write_text("in the way")
    found = mw.analyze(tmp_path)
    assert len(found.ranks) == 1
    assert any("not kept in Parquet" in note for note in notes(found))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(small(0, [(0, 5)]))
    (tmp_path / "b.json").write_text(small(1, [(0, 5)]))
    (tmp_path / "b.json").chmod(0)
    assert [Path(one.path).name for one in mw.analyze(tmp_path).broken] == ["b.json"]


def test_recorded_jobs_name_their_published_causes(meshwright: Run) -> None:
    """One slow worker in AR, the last of four stages in ST (StragglerAnalysis)."""
    found = meshwright("analyze", str(TRACES / "straggler"))
    assert found.returncode == 0, found.stderr
    slow, stage = found.stdout.split("job ST")
    assert "explains 100 % of a slow-down of 1.97x" in slow
    assert "stage 3 (ranks 6-7) has more work than the others" in stage


def test_a_plan_of_another_job_is_a_note_without_ratios(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"{rank}.json").write_text(small(rank, [(0, 5), (9, 5)]))
    job = {"model": "llama3-8b", "cluster": "4x8xh100", "global_batch": 64, "seq_len": 4096}
    found = mw.analyze(tmp_path, plan=Plan.of({**job, "dp": 32, "zero": 2, "recompute": "full"}), cache=False)
    told = [line for line in (*lines(found), *notes(found)) if "plan" in line]
    assert told == [
        "the traces tell of a job of 4 ranks, the plan of 32 devices: is it this run's plan? They are not compared"
    ]
