"""Generated Triton kernels, run by Triton's interpreter: in a process of its own, since what a kernel becomes is decided
when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.compression import codecs
from tests.packages import installed

ROOT = Path(__file__).resolve().parents[2]
POINTERS = {
    "message": "*u8", "tiles": "*i64", "segments": "*i64", "programs": "*i64", "groups": "*i64",
    "board": "*i64", "found": "*i32", "sums": "*i32", "words": "*i32", "listed": "*i64",
    **dict.fromkeys(["flat", "residual", "agreed", "partial", "stats", "out", "values"], "*fp32"),
}  # fmt: skip
WHOLE = dict.fromkeys(["seed", "many"], "i32")
CHOICES = {
    "ALIGNED": 16,
    "width": 8,
    "each": 16,
    "LISTED": 16,
    "wide": 1024,
    "WIDE": 512,
    "SHARE": 32,
    "CHAIN": 2,
    "chain": 2,
}  # others are on


@pytest.mark.skipif(not installed("triton"), reason="no Triton")
def test_kernels_say_what_the_reference_says() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, str(ROOT / "tests/compression/interpreted.py")],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.skipif(not installed("triton"), reason="no Triton")
@pytest.mark.skipif(
    "TRITON_INTERPRET" in os.environ, reason="TRITON_INTERPRET is set: kernels are interpreted, not compiled"
)
@pytest.mark.parametrize("name", ["int4", "randomk", "terngrad", "topk"])
def test_kernels_are_compiled_without_a_device(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter forgives what the compiler does not. What a codec needs of each kind is wide loads of the numbers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from meshwright.compression.backends.triton.batch import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    _, found = kernels(codecs()[name].program, 1024)
    wanted = (
        "reduce",
        "finish",
        "search",
        "pass",
        "refine",
        "choose",
        "collect",
        "write_message",
        "decode",
        "scatter",
        "heads",
    )
    for kernel, function in found.items():
        if kernel.endswith("_tile") or not kernel.startswith(wanted) or not hasattr(function, "arg_names"):
            continue
        types = {**POINTERS, **WHOLE}
        names = function.arg_names
        constant = {(i,): CHOICES.get(one, True) for i, one in enumerate(names) if one not in types}
        aligned = {(i,): [["tt.divisibility", 16]] for i, one in enumerate(names) if one in POINTERS}
        signature = {one: types.get(one, "constexpr") for one in names}
        made = triton.compile(ASTSource(function, signature, constant, aligned), target=GPUTarget("cuda", 90, 32))
        if kernel.startswith(("reduce", "search", "pass", "refine", "choose", "write_message")):
            assert "ld.global.v4.b32" in made.asm["ptx"], kernel
