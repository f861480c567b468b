"""Generated Triton kernels, run by Triton's interpreter: in a process of its own, since what a kernel becomes is decided
when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages import installed

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not installed("triton"), reason="no Triton")
def test_kernels_say_what_the_reference_says() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, str(ROOT / "tests/compress/interpreted.py")],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
