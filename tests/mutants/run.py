"""How sharp the tests are: which of 300 drawn mutants they notice.

    python -m tests.mutants.run --draw mutants.json              draw them from this release's source
    python -m tests.mutants.run --use mutants.json --json out    try those that are still there; goes on where it stopped
    python -m tests.mutants.run --compare before.json out        which were noticed before, and are not now

Each mutant is written into a copy of the repository, and the tests that import its file are run, then those of its room,
until one fails or the time is up. 300 take hours.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.mutants.draw import Mutant, digest, drawn, functions, mutated

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 150.0  # for the tests of one mutant


def tests_of(path: Path) -> list[str]:
    """Return the test files to run for a source file, the nearest first."""
    parts = path.relative_to(ROOT / "src" / "meshwright").with_suffix("").parts
    module = ".".join(("meshwright", *(part for part in parts if part != "__init__")))
    room = ROOT / "tests" / parts[0]
    every = sorted((ROOT / "tests").rglob("test_*.py"))
    named = [test for test in every if re.search(rf"\b{re.escape(module)}\b", test.read_text())]
    found = [*named, *(sorted(room.glob("test_*.py")) if room.is_dir() else [])]
    skipped = {"gpu", "targets", "golden", "mutants"}
    return [str(t.relative_to(ROOT)) for t in dict.fromkeys(found) if not skipped & set(t.relative_to(ROOT).parts)]


def noticed(path: Path, text: str, copy: Path) -> bool | None:
    """Return True if a test fails on a changed file, False if none does, None if the time was up or no test is near."""
    there = copy / path.relative_to(ROOT)
    before = there.read_text()
    there.write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{copy / 'src'}{os.pathsep}{copy}", "MESHWRIGHT_SHARES": "off"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests_of(path)]
    try:
        if len(command) == 7:
            return None
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=SECONDS, check=False)
        return done.returncode != 0
    except subprocess.TimeoutExpired:
        return None
    finally:
        there.write_text(before)


def tried(mutants: list[Mutant], output: Path) -> None:
    """Try mutants one after the other; `output` holds what came of each."""
    found = json.loads(output.read_text()) if output.exists() else {}
    where = {digest(node): (path, node) for path, node in functions(ROOT / "src")}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        ignored = shutil.ignore_patterns(".venv*", ".git", "__pycache__", "_build", ".mypy_cache")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for mutant in mutants:
            key = f"{mutant.function}:{mutant.place}"
            if key in found:
                continue
            if mutant.function not in where:
                found[key] = "gone"
            else:
                path, node = where[mutant.function]
                seen = noticed(path, mutated(path, node, mutant.place), copy)
                found[key] = {True: "noticed", False: "missed", None: "late"}[seen]
                print(f"{len(found):4} {found[key]:8} {path.relative_to(ROOT)}:{node.lineno} {node.name}", flush=True)
            output.write_text(json.dumps(found, indent=1))
    values = list(found.values())
    print({kind: values.count(kind) for kind in sorted(set(values))})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, help="write drawn mutants to this file")
    parser.add_argument("--use", type=Path, help="try the mutants of this file")
    parser.add_argument("--json", type=Path, default=Path("noticed.json"), help="what came of each")
    parser.add_argument("--compare", type=Path, nargs=2, help="two such files, before and after")
    chosen = parser.parse_args()
    if chosen.draw:
        chosen.draw.write_text(json.dumps([asdict(each) for each in drawn(ROOT / "src")]))
    if chosen.use:
        tried([Mutant(**each) for each in json.loads(chosen.use.read_text())], chosen.json)
    if chosen.compare:
        before, after = (json.loads(path.read_text()) for path in chosen.compare)
        lost = [key for key, what in before.items() if what == "noticed" and after.get(key) not in ("noticed", "gone")]
        print(f"{len(lost)} were noticed before and are not now: {lost}")
        return 1 if len(lost) > 6 else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
