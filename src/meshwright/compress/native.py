"""Codecs in C: built once with the platform's compiler, kept in the user's cache, called without holding up Python."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.compress.batch import Batch
from meshwright.compress.c_source import c_source
from meshwright.compress.program import Program
from meshwright.errors import MeshwrightError

NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
# Fused multiply-add would round differently from other back ends; divisions by zero inside `where` must not trap.
FLAGS = (
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-fwrapv",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-w",
)
FASTEST_FIRST = (("-O3", "-march=native"), ("-O2",))
BUILD_SECONDS = 120
ALL, MEASURE, REST = 0, 1, 2  # as in native.h


class BuildError(MeshwrightError):
    """The compiler did not do what it was asked to."""


class NativeBatch(Batch):
    """Gradients that one call to C encodes."""

    def __init__(
        self, program: Program, counts: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(program, counts, device, dtype)
        rows = list(zip(self.counts, self.starts, self.places, strict=False))
        self._table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
        self._libraries = {dtype: library(program, NAMES[dtype])}

    def measure(self, flat: Tensor, *, residual: Tensor | None = None) -> None:
        self.check(None, flat, residual)
        if self.program.agrees is not None:
            self._encode(flat, None, residual, 0, MEASURE)

    def encode(
        self, flat: Tensor, message: Tensor, *, residual: Tensor | None = None, seed: int = 0, agreed: bool = False
    ) -> None:
        self.check(message, flat, residual)
        self._encode(flat, message, residual, seed, REST if agreed and self.program.agrees is not None else ALL)

    def _encode(self, flat: Tensor, message: Tensor | None, residual: Tensor | None, seed: int, mode: int) -> None:
        self._libraries[self.dtype].encode(
            address(flat),
            address(residual),
            address(message),
            address(self._table),
            len(self.counts),
            seed & 0xFFFFFFFF,
            address(self.agreed),
            mode,
        )

    def decode(self, message: Tensor, out: Tensor, *, add: bool = False) -> None:
        self.check(message, out, out=True)
        if out.dtype not in self._libraries:
            self._libraries[out.dtype] = library(self.program, NAMES[out.dtype])
        self._libraries[out.dtype].decode(
            address(message), address(out), address(self._table), len(self.counts), address(self.agreed), int(add)
        )


def address(tensor: Tensor | None) -> ctypes.c_void_p | None:
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


@cache
def compiler() -> str:
    """The C compiler of this machine, "" if there is none."""
    wanted = [os.environ.get("CC", "").split(" ")[0], "cc", "gcc", "clang"]
    return next((found for name in wanted if name and (found := shutil.which(name))), "")


def library(program: Program, number: str) -> Any:
    """The compiled program for gradients of a type (f32, f16, bf16)."""
    made = loaded(c_source(program, number))
    pointer, many, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    made.encode.argtypes = [pointer, pointer, pointer, pointer, many, ctypes.c_uint32, pointer, whole]
    made.decode.argtypes = [pointer, pointer, pointer, many, pointer, whole]
    made.encode.restype = made.decode.restype = None
    return made


@cache
def loaded(source: str) -> Any:
    """C source, built and loaded."""
    try:
        return ctypes.CDLL(str(_shared_object(source)))
    except (OSError, subprocess.SubprocessError) as error:  # no room, a folder without execution, a compiler that hangs
        raise BuildError(f"a codec could not be built or loaded: {error}") from error


def _shared_object(source: str) -> Path:
    """The file, built unless an earlier process has: written aside and renamed, so that no process sees half of it."""
    key = hashlib.sha256("\n".join([source, _compiler_version(), repr((FLAGS, FASTEST_FIRST)), _cpu()]).encode())
    folder = _cache_folder()
    path = folder / f"{key.hexdigest()[:32]}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        text, made = Path(aside) / "codec.c", Path(aside) / "codec.so"
        text.write_text(source)
        for speed in FASTEST_FIRST:
            command = [compiler(), *speed, *FLAGS, str(text), "-o", str(made), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
            if done.returncode == 0:
                made.replace(path)
                return path
    raise BuildError(f"{compiler()} could not build a codec: {done.stderr.strip()[:2000]}")


@cache
def _compiler_version() -> str:
    done = subprocess.run([compiler(), "--version"], capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    return compiler() + done.stdout


@cache
def _cpu() -> str:
    """What -march=native depends on: a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )


@cache
def _cache_folder() -> Path:
    """The user's own: code is loaded from it, so that no other user may write there."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(home) / "meshwright" / "codecs"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="meshwright-codecs-"))
