"""`meshwright watch`: programs run as they would by themselves; streams are shown, compared and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Run

PROGRAM = """
import sys
import helper

class Job:
    def __init__(self, n):
        self.n = n

    def go(self):
        self.n += helper.double(2)
        return self.n

def main():
    if "fail" in sys.argv:
        raise RuntimeError("as asked")
    print(__name__, sys.argv[1:], Job(1).go())
    if "leave" in sys.argv:
        sys.exit(7)

main()
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    return "program.py"


def test_a_script_runs_as_ever(meshwright: Run, program: str) -> None:
    done = meshwright("watch", program, "--target", "program:Job", "--attributes", "*", "--", "a", "--b")
    assert done.returncode == 0
    assert done.stdout == "__main__ ['a', '--b'] 5\n"
    said = [" ".join(line.split()[2:5]) for line in done.stderr.splitlines()]
    assert said[:3] == ["run Job.__init__ program.py:6", "set Job.n =", "end Job.__init__ " + said[2].split()[2]]
    assert said[3:5] == ["run Job.go program.py:9", "set Job.n 1"]


def test_without_targets_all_of_the_script(meshwright: Run, program: str) -> None:
    done = meshwright("watch", program)
    runs = [line.split()[3] for line in done.stderr.splitlines() if " run " in line]
    assert runs == ["main", "Job.__init__", "Job.go"]


def test_targets_in_modules_that_the_script_imports(meshwright: Run, program: str, tmp_path: Path) -> None:
    done = meshwright("watch", program, "-t", "helper:double", "--wrapper", "plain", "-o", "run")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [json.loads(line) for line in (tmp_path / "run.rank0.jsonl").read_text().splitlines()]
    assert [(line["event"], line["text"]) for line in lines[1:-1]] == [("run", "x=2"), ("end", "-> 4")]
    assert {line["rank"] for line in lines} == {0}


def test_modules_run_too(meshwright: Run, program: str, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("")
    (tmp_path / "pkg/__main__.py").write_text("def start():\n    print(__package__)\n\nstart()\n")
    done = meshwright("watch", "-m", "pkg")
    assert done.stdout == "pkg\n"
    assert "run start" in done.stderr
    done = meshwright("watch", "-m", "program", "-t", "program:main", "--", "x")
    assert done.stdout == "__main__ ['x'] 5\n"
    assert "end main" in done.stderr


def test_exit_codes_and_tracebacks_are_the_programs_own(meshwright: Run, program: str, tmp_path: Path) -> None:
    assert meshwright("watch", program, "-o", "run", "--", "leave").returncode == 7
    assert '"end"' in (tmp_path / "run.rank0.jsonl").read_text()
    done = meshwright("watch", program, "-o", "run", "--", "fail")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "RuntimeError: as asked"
    assert "meshwright" not in done.stderr
    assert '"raise"' in (tmp_path / "run.rank0.jsonl").read_text()


def test_ranks(meshwright: Run, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("0", "1", "2"):
        monkeypatch.setenv("RANK", rank)
        assert meshwright("watch", program, "--ranks", "0,2", "-o", "run").returncode == 0
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run.rank0.jsonl", "run.rank2.jsonl"]


def test_streams_are_shown_compared_and_drawn(
    meshwright: Run, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank, word in (("0", "x"), ("1", "x"), ("2", "fail")):
        monkeypatch.setenv("RANK", rank)
        meshwright("watch", program, "-o", "run", "--", word)
    done = meshwright("watch", "--show", "run")
    assert done.returncode == 0
    assert {line.split()[1] for line in done.stdout.splitlines()} == {"r0", "r1", "r2"}
    times = [line.split()[0] for line in done.stdout.splitlines()]
    assert times == sorted(times)
    rows = [json.loads(line) for line in meshwright("watch", "--show", "run", "--json").stdout.splitlines()]
    assert len(rows) == len(times)
    same = meshwright("watch", "--diff", "0,1", "run")
    assert (same.returncode, same.stdout) == (0, "ranks 0 and 1 do the same: 3 calls\n")
    other = meshwright("watch", "--diff", "0,2", "run.rank0.jsonl", "run.rank2.jsonl")
    assert other.returncode == 1
    assert "> rank 0: run Job.__init__" in other.stdout
    assert "> rank 2: raise main  RuntimeError: as asked" in other.stdout
    facts = json.loads(meshwright("watch", "--diff", "0,2", "run", "--json").stdout)
    assert (facts["same"], facts["calls"], facts["flow"]["path"]) == (False, 1, ["main"])
    assert meshwright("watch", "--perfetto", "trace.json", "run").returncode == 0
    kinds = [row["ph"] for row in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert kinds.count("B") == kinds.count("E") == 7


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "SCRIPT: is needed"),
        (["none.py"], "none.py: no such file"),
        (["bad.py"], "bad.py:1:5: is no Python"),
        (["program.py", "-t", "program:Jb"], "did you mean Job? (valid: Job, Job.__init__, Job.go, main)"),
        (["program.py", "-t", "helper:dobule"], "did you mean double? (valid: double)"),
        (["program.py", "-t", "nowhere.at_all"], "there is no module 'nowhere.at_all'"),
        (["program.py", "--wrapper", "tensors"], "did you mean tensor?"),
        (["program.py", "--ranks", "a"], "--ranks: is 'a'"),
        (["program.py", "-o", "no/such/run"], "there is no folder"),
        (["program.py", "--json"], "--json: goes with --show"),
        (["-m", "no_such_module"], "there is no module 'no_such_module'"),
        (["--show", "nothing"], "no such file"),
        (["--show", "program.py"], "is no event of a watch"),
        (["--diff", "0", "run"], "--diff: is '0' (valid: two ranks"),
        (["--show", "-t", "x", "run"], "--target: does not go with --show"),
    ],
)
def test_mistakes_are_one_line(meshwright: Run, program: str, tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "bad.py").write_text("def (:\n")
    done = meshwright("watch", *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_a_target_that_is_never_imported_is_said(meshwright: Run, program: str) -> None:
    done = meshwright("watch", program, "-t", "colorsys")
    assert done.returncode == 0
    assert done.stderr == "note: 'colorsys' was never imported, so nothing of it was watched\n"


def test_an_empty_stream_leaves_the_others_readable(
    meshwright: Run, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is ended at the wrong moment has made its file and written nothing."""
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        meshwright("watch", program, "-o", "run")
    (tmp_path / "run.rank3.jsonl").touch()
    note = "note: run.rank3.jsonl holds no events: its process ended as it began to write\n"
    for words in (["--show"], ["--diff", "0,1"], ["--perfetto", "trace.json"]):
        done = meshwright("watch", *words, "run")
        assert (done.returncode, done.stderr) == (0, note)
        assert done.stdout
    for words in (["--diff", "0,3", "run"], ["--show", "run.rank3.jsonl"]):
        done = meshwright("watch", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.endswith("run.rank3.jsonl: holds no events\n")
