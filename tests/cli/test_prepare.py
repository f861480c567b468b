"""The verb `prepare`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.test_bad_input import mistake
from tests.conftest import Run


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "corpus.jsonl").write_text('{"text": "hello", "body": "hi"}\n{"text": "", "body": "you"}\n')
    return "corpus.jsonl"


def test_for_people_and_for_programs(meshwright: Run, corpus: str, tmp_path: Path) -> None:
    done = meshwright("prepare", corpus, "-o", "tokens")
    assert done.returncode == 0, done.stderr
    assert "1 document, 6 tokens written to tokens" in done.stdout
    assert "1 empty document left out" in done.stdout
    facts = json.loads(meshwright("prepare", corpus, "-o", "other", "--field", "body", "--json").stdout)
    assert facts["folder"] == "other"
    assert (facts["tokens"], facts["documents"], facts["vocabulary"], facts["bytes"]) == (7, 2, 257, 14)
    manifest = json.loads((tmp_path / "other/manifest.json").read_text())
    assert manifest["sources"] == [{"file": corpus, "bytes": (tmp_path / corpus).stat().st_size}]


def test_mistakes(meshwright: Run, corpus: str, tmp_path: Path) -> None:
    mistake(meshwright("prepare", corpus), "-o", "--help")
    mistake(meshwright("prepare", "-o", "t"), "INPUT")
    mistake(meshwright("prepare", "nowhere.txt", "-o", "t"), "nowhere.txt", "no such file")
    mistake(meshwright("prepare", corpus, "-o", "t", "--tokenizer", "gpt2"), "tokenizer", "tokenizer.json")
    mistake(meshwright("prepare", corpus, "-o", "t", "--field", "content"), "corpus.jsonl:1:1", "content", "text, body")
    mistake(meshwright("prepare", corpus, "-o", "no/such"), "-o", "there is no folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == [corpus]


def test_bad_lines_and_finished_folders(meshwright: Run, corpus: str, tmp_path: Path) -> None:
    with open(tmp_path / corpus, "a") as file:
        file.write("{broken\n")
    mistake(meshwright("prepare", corpus, "-o", "t"), "corpus.jsonl:3:2", "malformed JSON", "--skip-bad")
    assert "1 bad line left out" in meshwright("prepare", corpus, "-o", "t", "--skip-bad").stdout
    mistake(meshwright("prepare", corpus, "-o", "t", "--skip-bad"), "already prepared", "--overwrite")
    assert meshwright("prepare", corpus, "-o", "t", "--skip-bad", "--overwrite").returncode == 0


def test_it_never_imports_torch(meshwright: Run, corpus: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = meshwright("prepare", corpus, "-o", "t", env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    line = '{"text": "' + "many words " * 1000 + '"}\n'
    (tmp_path / "corpus.jsonl").write_text(line * 10_000)  # 110 MB, about two seconds
    command = [sys.executable, "-c", "from meshwright.cli import main; main()", "prepare", "corpus.jsonl", "-o", "t"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not (tmp_path / "t.part").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers hear it too
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl"]
