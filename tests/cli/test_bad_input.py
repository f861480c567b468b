"""Every user mistake: exit code 2, one line that names file and field, no traceback, nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Run

PLAN = {"model": "tiny-llama", "cluster": "4xh100", "global_batch": 8}


def mistake(done, *words: str) -> None:  # type: ignore[no-untyped-def]
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["models", "lama3-70b"], ["llama3-70b"]),
        (["clusters", "8x8xh10"], ["h100"]),
        (["modelz"], ["did you mean models"]),
        (["models", "--jsn"], ["--json", "--help"]),
        (["models", "gpt2", "--seq", "2048"], ["1024"]),
        (["models", "gpt2", "--seq", "-5"], ["--seq"]),
        (["check"], ["PLAN"]),
        (["check", "tp=2.5"], ["tp", "got a number"]),
        (["check", "tp=2"], ["model", "--model"]),
        (["clusters", "8x8x"], ["names no device"]),
        (["check", "nowhere.json"], ["nowhere.json", "no such file"]),
        (["check", "."], ["folder"]),
        (["show", "nowhere.json"], ["nowhere.json"]),
        (["clusters", "nowhere.toml"], ["nowhere.toml", "no such file"]),
        (["models", "nowhere/config.json"], ["no such file"]),
        (["clusters", "local:0"], ["local:1"]),
        (["clusters", "local:"], ["local:1"]),
        (["clusters", "local:²"], ["local:1"]),
        (["completion", "tcsh"], ["bash"]),
    ],
)
def test_arguments(meshwright: Run, arguments: list[str], words: list[str]) -> None:
    mistake(meshwright(*arguments), *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["plan.json", "empty"]),
        (b"  \n\t ", ["plan.json", "empty"]),
        (b'{"tp": 4,}', ["plan.json:1:10", "malformed JSON"]),
        (b'{\n  "tp": 4\n  "pp": 2\n}', ["plan.json:3:3", "malformed JSON"]),
        (b'{"tp": 4', ["plan.json:1:9"]),
        (b"\xff\xfe\x00tp", ["plan.json", "UTF-8", "0xff"]),
        (b'"just text"', ["plan.json", "expected an object"]),
        (b"[1, 2]", ["plan.json", "expected an object"]),
        (b'{"tp": 4,\n "tp": 8}', ["plan.json:2:2", "tp", "twice"]),
        (b'{"tp": NaN}', ["plan.json:1:8", "NaN"]),
        (b"null", ["plan.json", "holds null"]),
        (b'{"tp": 1e400}', ["plan.json", "too large"]),
        (b'{"\\ud800": 1}', ["plan.json", "surrogate"]),
        (b"[" * 900 + b"]" * 900, ["plan.json", "nested"]),
        (b"[" * 100_000, ["plan.json", "malformed JSON"]),
        (b'{"tp": ' + b"9" * 6000 + b"}", ["plan.json"]),
        (b"\xef\xbb\xbf{}", ["model", "required"]),  # a byte-order mark is no mistake
        (json.dumps({**PLAN, "tp": 1e400}).encode(), ["plan.json"]),
        (json.dumps({**PLAN, "dp": 10**15}).encode(), ["plan.json", "dp"]),
        (json.dumps({**PLAN, "seq_len": -1}).encode(), ["plan.json", "seq_len"]),
        (json.dumps({**PLAN, "model": "lama"}).encode(), ["plan.json", "model", "llama"]),
        (json.dumps({**PLAN, "model": {"model_type": "mamba"}}).encode(), ["model_type", "not supported"]),
        (json.dumps({**PLAN, "cluster": {"group": [{"device": "h100", "nodes": 0}]}}).encode(), ["nodes"]),
        (json.dumps({**PLAN, "schedule": "1f2b"}).encode(), ["schedule", "1f1b"]),
        (json.dumps({**PLAN, "tp": 3}).encode(), ["rule: degrees"]),
    ],
)
@pytest.mark.parametrize("verb", ["check", "show"])
def test_plan_files(meshwright: Run, tmp_path: Path, content: bytes, words: list[str], verb: str) -> None:
    (tmp_path / "plan.json").write_bytes(content)
    mistake(meshwright(verb, "plan.json"), *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["empty"]),
        (b"group = 3", ["group"]),
        (b"[[group]]\nnodes = \n", [":2:9", "malformed TOML"]),
        (b"\x80", ["UTF-8"]),
        (b"name = 'x'\n", ["group", "required"]),
    ],
)
def test_cluster_files(meshwright: Run, tmp_path: Path, content: bytes, words: list[str]) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    mistake(meshwright("clusters", "c.toml"), "c.toml", *words)


def test_errors_as_json(meshwright: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**PLAN, "zero": 9}))
    done = meshwright("check", "plan.json", "--json")
    assert done.returncode == 2
    facts = json.loads(done.stdout)
    assert (facts["file"], facts["field"], facts["valid"]) == ("plan.json", "zero", "0, 1, 2, 3")
    (tmp_path / "plan.json").write_text(json.dumps({**PLAN, "tp": 3}))
    assert json.loads(meshwright("check", "plan.json", "--json").stdout)["rule"] == "degrees"
    assert "llama3-70b" in json.loads(meshwright("models", "lama3-70b", "--json").stdout)["closest"]


def test_unwritable_output_leaves_nothing(meshwright: Run, tmp_path: Path) -> None:
    mistake(meshwright("cluster", "detect", "-o", "no/such/folder/c.toml"), "c.toml", "cannot be written")
    mistake(meshwright("cluster", "detect", "-o", str(tmp_path)), "cannot be written")
    mistake(meshwright("cluster", "detect", "-o", "/proc/c.toml"), "cannot be written")
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_file(meshwright: Run) -> None:
    mistake(meshwright("check", "/proc/self/mem"), "/proc/self/mem", "cannot be read")


def test_a_closed_pipe_is_no_error(meshwright: Run, tmp_path: Path) -> None:
    import subprocess
    import sys

    command = f"{sys.executable} -c 'from meshwright.cli import main; main()' models llama3.1-405b --json | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "{"
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_options_are_blamed_for_their_own_mistakes(meshwright: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    job = ["--model", "tiny-llama", "--cluster", "4xh100", "--batch", "8"]
    mistake(meshwright("check", "tp=2", *job[:-1], "0"), "--batch")
    mistake(meshwright("check", "tp=2", "--model", "lama", *job[2:]), "--model", "llama")
    mistake(meshwright("check", "tp=2", *job, "--precision", "bf61"), "--precision", "bf16")
    mistake(meshwright("check", "tp=2", "--seq", "128"), "--model", "beside --seq")
    mistake(meshwright("check", "plan.json", "--seq", "128"), "--seq", "job of its own")
    mistake(meshwright("check", "tp=2,pp", *job), "NAME=VALUE")
    assert meshwright("check", "tp=2,pp=2", *job).returncode == 0


def test_standard_input_is_read_like_a_file() -> None:
    mistake(run_in_shell("check - <&-"), "standard input", "closed")
    mistake(run_in_shell("check - < /dev/null"), "standard input", "empty")
    mistake(run_in_shell("check - < <(printf '\\xff{}')"), "standard input", "UTF-8")
    plan = json.dumps(PLAN)
    assert run_in_shell(f"check - < <(printf '\\xef\\xbb\\xbf%s' '{plan}')").returncode == 0


def test_standard_input(meshwright: Run) -> None:
    assert meshwright("check", "-", input=json.dumps(PLAN)).returncode == 0
    mistake(meshwright("check", "-", input="{"), "standard input", "malformed JSON")


def test_text_is_never_read_as_markup(meshwright: Run, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[[group]]\ndevice = "h100"\ntitle = "A [/] [bold]B"\n')
    assert "A [/] [bold]B" in meshwright("clusters", "c.toml").stdout


def run_in_shell(command: str):  # type: ignore[no-untyped-def]
    """As a user's shell would, with Python's own buffering whatever the caller has set."""
    import os
    import subprocess
    import sys

    start = f"{sys.executable} -c 'from meshwright.cli import main; main()'"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(["bash", "-c", f"{start} {command}"], capture_output=True, text=True, check=False, env=plain)


def test_a_full_disk_on_standard_output(tmp_path: Path) -> None:
    """A full disk is no bad input: the exit code is 1."""
    done = run_in_shell("models > /dev/full")
    assert (done.returncode, done.stderr.splitlines()) == (
        1, ["error: standard output: cannot be written: No space left on device"]
    )  # fmt: skip


def test_a_closed_standard_output() -> None:
    done = run_in_shell("models >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_without_the_characters(meshwright: Run, tmp_path: Path) -> None:
    import os

    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    done = meshwright("show", "plan.json", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert "AAAA" in done.stdout


def test_no_arguments_is_a_question(meshwright: Run) -> None:
    done = meshwright()
    assert done.returncode == 0
    assert "Start here" in done.stdout


def test_a_bug_of_ours_is_not_a_plan_that_does_not_fit(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import meshwright.cli as c; c.cli.main = lambda **_: 1 / 0; c.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 70
    assert "ZeroDivisionError" in done.stderr


def test_an_error_that_nobody_hears_keeps_its_code() -> None:
    for command in (
        "models nope --json > /dev/full",
        "models nope 2> /dev/full",
        "models nope 2>&-",
        "models nope --json >&-",
        "models nope --json > /dev/full 2> /dev/full",
    ):
        assert run_in_shell(command).returncode == 2, command


def test_a_bug_is_an_object_for_programs(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = "import meshwright.cli as c; c.cli.main = lambda **_: 1 / 0; c.main()"
    done = subprocess.run([sys.executable, "-c", code, "--json"], capture_output=True, text=True, check=False)
    assert "ZeroDivisionError" in json.loads(done.stdout)["error"]
