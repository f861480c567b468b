"""A verb whose extra is not installed says which one brings it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PLAN = str(Path(__file__).parents[2] / "examples/llama3-70b.json")
CASES = [
    ("torch", "run", ["train", "tiny-llama", "--steps", "1"]),
    ("torch", "run", ["measure", "-o", "cluster.toml"]),
    ("torch", "run", ["compress", "bench"]),
    ("torch", "run", ["compress", "explain", "--processes", "2"]),
    ("torch", "run", ["compress", "explain", PLAN]),
    ("pyarrow", "data", ["prepare", "rows.parquet", "-o", "tokens"]),
    ("highspy", "milp", ["plan", "tiny-gpt2", "2xh100", "--batch", "4", "--seq", "64", "--solver", "milp"]),
]


@pytest.mark.parametrize(
    ("library", "extra", "verb"), CASES, ids=lambda value: value[0] if isinstance(value, list) else value
)
def test_a_missing_extra_is_named(library: str, extra: str, verb: list[str], tmp_path: Path) -> None:
    (tmp_path / "aside").mkdir()
    text = f"raise ModuleNotFoundError(\"No module named '{library}'\", name='{library}')\n"
    (tmp_path / f"aside/{library}.py").write_text(text)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    setup = f"import sys; sys.path.insert(0, {str(tmp_path / 'aside')!r}); sys.argv = ['meshwright', *{verb!r}]"
    command = [sys.executable, "-c", f"{setup}; from meshwright.cli import main; main()"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stderr
    assert f"pip install 'meshwright[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
