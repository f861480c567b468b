"""Ask the drawn questions and keep the answers, or hold this release's answers against kept ones.

    python -m tests.golden.record --write             keep the answers of this release in answers.json.gz
    python -m tests.golden.record                     say which answers differ from the kept ones
    python -m tests.golden.record --only 0-59,270     some of the questions

Everything that is a matter of the moment (seconds that something took, folders, dates, memory of a process) is left out.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.golden.draws import COUNT, Question, question

HERE = Path(__file__).resolve().parent
KEPT = HERE / "answers.json.gz"
TRACES = HERE.parent / "data" / "traces"
CLOSE = 1e-9  # relative; sums in another order, on another processor
TRAINED = 2e-6  # relative, of losses and norms after some steps
MOMENTARY = {
    "seconds",
    "step_time_s",
    "tokens_per_s",
    "mfu",
    "peak_memory_bytes",
    "peak_tensor_bytes",
    "made_by",
    "time",
    "run",
    "host",
}
_TOOK = re.compile(r"(candidates in|, ) ?[\d.]+ s(?=$|[\s,;)])|in \d+(\.\d+)? (s|ms)\b")


def ask(asked: Question) -> Any:
    """Return the answer of the command line: its exit code, and what it says, as plain values."""
    with tempfile.TemporaryDirectory() as folder:
        words = [word.replace("TRACES", str(TRACES)) for word in asked.command]
        words += {"files": ["-o", "out"], "run": ["-o", "out", "--json"]}.get(asked.answer, [])
        done = subprocess.run(
            [sys.executable, "-m", "meshwright", *words],
            cwd=folder, capture_output=True, text=True, check=False, timeout=900,
            env={**os.environ, "COLUMNS": "120", "PYTHONPATH": str(HERE.parents[1] / "src")},
        )  # fmt: skip
        found: dict[str, Any] = {"code": done.returncode}
        if asked.answer == "run":
            steps = [_lasting(json.loads(line)) for line in done.stdout.splitlines()]
            found |= {"steps": [{k: v for k, v in step.items() if k != "tokens_per_second"} for step in steps]}
            found |= {"checkpoint": _checkpoint(Path(folder) / "out")} if not done.returncode else {"said": done.stderr}
            return found
        said = done.stderr if done.returncode in (1, 2) else ""
        text = done.stdout.replace(str(TRACES), "TRACES").replace(folder, "FOLDER")
        found |= {"said": _TOOK.sub("", said.replace(str(TRACES), "TRACES").replace(folder, "FOLDER"))}
        if asked.answer == "json" and text.startswith(("{", "[")):
            return found | {"json": _lasting(json.loads(text))}
        found |= {"text": [_TOOK.sub("", line).rstrip() for line in text.splitlines()]}
        if asked.answer == "files" and (Path(folder) / "out").is_dir():
            found |= {"files": dict(_files(Path(folder) / "out"))}
        return found


def _files(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            text = path.read_text()
            yield (
                str(path.relative_to(folder)),
                _lasting(json.loads(text)) if path.suffix == ".json" else text.splitlines(),
            )


def _checkpoint(folder: Path) -> dict[str, list[Any]]:
    """Return shape, type and two sums of every tensor of the last checkpoint, by name."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    (last,) = sorted(folder.rglob(".metadata"))[-1:]
    whole = folder / "whole.pt"
    dcp_to_torch_save(last.parent, whole)
    return {name: _digest(value) for name, value in _tensors(torch.load(whole, weights_only=False), "")}


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _tensors(value[key], f"{name}.{key}".lstrip("."))
    elif hasattr(value, "shape"):
        yield name, value


def _digest(value: Any) -> list[Any]:
    flat = value.detach().double().flatten()
    return [f"{list(value.shape)} {value.dtype}", float(flat.abs().sum()), float(flat.square().sum())]


def _lasting(value: Any) -> Any:
    """Return the part of a document that does not depend on the moment."""
    if isinstance(value, dict):
        return {key: _lasting(each) for key, each in value.items() if key not in MOMENTARY}
    if isinstance(value, list):
        return [_lasting(each) for each in value]
    if isinstance(value, str):
        return _TOOK.sub("", value.replace(str(TRACES), "TRACES"))
    return value


def differences(kept: Any, found: Any, close: float, at: str = "") -> Iterator[str]:
    """Yield where two answers differ."""
    if isinstance(kept, dict) and isinstance(found, dict):
        for key in sorted({*kept, *found}):
            if key not in kept or key not in found:
                yield f"{at}.{key}: only {'kept' if key in kept else 'found'}"
            else:
                yield from differences(kept[key], found[key], close, f"{at}.{key}")
    elif isinstance(kept, list) and isinstance(found, list):
        if len(kept) != len(found):
            yield f"{at}: {len(kept)} items kept, {len(found)} found"
        for i, (one, other) in enumerate(zip(kept, found, strict=False)):
            yield from differences(one, other, close, f"{at}[{i}]")
    elif isinstance(kept, float | int) and isinstance(found, float | int):
        if not math.isclose(kept, found, rel_tol=close, abs_tol=1e-12):
            yield f"{at}: {kept} kept, {found} found"
    elif kept != found:
        yield f"{at}: {kept!r} kept, {found!r} found"


def compare(number: int, kept: Any, found: Any) -> list[str]:
    """Return where an answer differs from the kept one."""
    return list(differences(kept, found, TRAINED if question(number).answer == "run" else CLOSE))


def answers(numbers: Iterable[int], processes: int) -> Iterator[tuple[int, Any]]:
    """Yield the answers to some questions, as they come in order."""
    with ThreadPoolExecutor(processes) as pool:
        yield from pool.map(lambda number: (number, ask(question(number))), numbers)


def kept_answers() -> dict[int, Any]:
    """Return what answers.json.gz holds."""
    with gzip.open(KEPT, "rt") as file:
        return {int(number): answer for number, answer in json.load(file).items()}


def _numbers(text: str) -> list[int]:
    parts = [part.split("-") for part in text.split(",")]
    return [n for part in parts for n in range(int(part[0]), int(part[-1]) + 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the answers")
    parser.add_argument("--only", default=f"0-{COUNT - 1}", help="questions by number, as 0-59,270")
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    kept = kept_answers() if KEPT.exists() else {}
    found, different = dict(kept), []
    for number, answer in answers(_numbers(chosen.only), chosen.processes):
        found[number] = answer
        lines = compare(number, kept[number], answer) if number in kept else []
        if lines:
            different.append(number)
            print(number, " ".join(question(number).command))
            print("".join(f"    {line}\n" for line in lines[:8]), flush=True)
    if chosen.write:
        digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]
        with gzip.GzipFile(KEPT, "wb", mtime=0) as file:
            file.write(json.dumps(found, sort_keys=True).encode())
        print(f"kept {len(found)} answers, {digest}")
    print(f"{len(different)} answers differ from the kept ones: {different}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
