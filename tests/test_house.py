"""The rules of the house: folders that can be overseen, names that can be guessed, commits that can be read."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

import meshwright
from tests.conftest import ROOT

SOURCE = ROOT / "src" / "meshwright"
ENTRIES = 15  # of a folder, beside its __init__.py; the top level is the list of rooms
LONGEST, LONG, SEVERAL = 450, 350, 15  # lines of a file; of a long file; so many of those
# A name that repeats in a room is that of the same role: a backend, a framework, a level, a kernel beside its layer.
ROLES = {
    "compression": {"batch", "decoder"},
    "frameworks": {"nearest_plan", "read", "write"},
    "run": {"adam8bit", "cross_entropy", "rotary"},
    "traces": {"collectives", "steps"},
}
# Openings of docstrings that do not say what a function returns or does.
OPENINGS = {"Of", "Whether", "What", "How", "Which", "Where", "That"}
FIRST = "1abd17f"  # commits before it have subjects of any length


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def packages() -> list[Path]:
    return sorted(path.parent for path in SOURCE.rglob("__init__.py"))


@pytest.mark.parametrize("folder", packages(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_folder_can_be_overseen(folder: Path) -> None:
    entries = {path.name for path in folder.iterdir()} - {"__init__.py", "__pycache__", "py.typed"}
    if folder != SOURCE:
        assert len(entries) <= ENTRIES


def test_a_name_repeats_in_a_room_only_for_the_same_role() -> None:
    found: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for path in files():
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[parts[0]][parts[-1]] += parts[-1] != "__init__"
    repeated = {room: {name for name, count in names.items() if count > 1} for room, names in found.items()}
    assert {room: names for room, names in repeated.items() if names} == ROLES


def test_no_package_is_named_like_a_public_function() -> None:
    functions = {name for name in meshwright.__all__ if callable(getattr(meshwright, name)) and name.islower()}
    assert {"plan", "train", "export", "analyze", "watch", "estimate"} <= functions
    assert not {folder.name for folder in SOURCE.iterdir() if folder.is_dir()} & functions


def test_a_part_names_the_files_that_others_import() -> None:
    """In its front, `- `name`: what it holds`, or by importing them there."""
    imported: defaultdict[str, set[str]] = defaultdict(set)
    for path in files():
        room = path.relative_to(SOURCE).parent.parts
        for module in modules_of(path):
            parent, _, name = module.rpartition(".")
            if tuple(parent.split("."))[1:] != room[: len(parent.split(".")) - 1]:
                imported[parent].add(name)
    for folder in packages():
        front = (folder / "__init__.py").read_text()
        parts = folder.relative_to(SOURCE).parts
        if len(parts) > 1 and "- `" in front:
            missing = {n for n in imported[".".join(("meshwright", *parts))] if (folder / f"{n}.py").exists()}
            assert {name for name in missing if f"`{name}`" not in front and f".{name} " not in front} == set(), folder


def modules_of(path: Path) -> set[str]:
    """Return the modules of this package that a file imports."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {node.module for node in nodes if (node.module or "").startswith("meshwright.")}  # type: ignore[misc]


def test_few_files_are_long() -> None:
    sizes = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in files()}
    assert {name: size for name, size in sizes.items() if size > LONGEST} == {}
    assert len([name for name, size in sizes.items() if size > LONG]) <= SEVERAL


def test_docstrings_say_what_a_function_returns_or_does() -> None:
    found = []
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                text = ast.get_docstring(node) or ""
                if text.split(" ", 1)[0] in OPENINGS:
                    found.append(f"{path.relative_to(SOURCE)}: {text[:60]}")
    assert found == []


def test_subjects_of_commits_fit_a_line() -> None:
    log = ["git", "log", "--no-merges", "--format=%s", f"{FIRST}.."]
    done = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("git, or the history of this checkout, is missing: subjects cannot be read")
    bad = [s for s in done.stdout.splitlines() if len(s) > 72 or s.endswith(".") or not re.match(r"[A-Z]", s)]
    assert bad == []
