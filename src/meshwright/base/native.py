"""C in this package: compiled with the wheel, or, where it is generated, once by the platform's compiler."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError

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


class BuildError(MeshwrightError):
    """Failure of the compiler."""


@cache
def compiler() -> str:
    """Return the C compiler of this machine, "" if there is none."""
    wanted = [os.environ.get("CC", "").split(" ")[0], "cc", "gcc", "clang"]
    return next((found for name in wanted if name and (found := shutil.which(name))), "")


@cache
def packaged(module: str) -> Any:
    """Return a library that was compiled when this package was built: `meshwright.traces.rank._nesting`."""
    package, _, name = module.rpartition(".")
    path = files(package).joinpath(name + str(sysconfig.get_config_var("EXT_SUFFIX")))
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(
            f"{path.name} is missing: this package was built without a C compiler; install a wheel, or a compiler and then "
            "meshwright again"
        ) from error


@cache
def loaded(source: str, include: str = "") -> Any:
    """Build and load C source; `include` is a folder of headers that it needs.

    >>> if compiler():
    ...     assert loaded("int twice(int x) { return 2 * x; }").twice(21) == 42
    """
    try:
        return ctypes.CDLL(str(_shared_object(source, include)))
    except (OSError, subprocess.SubprocessError) as error:  # no room, a folder without execution, a compiler that hangs
        raise BuildError(f"C could not be built or loaded: {error}") from error


def _shared_object(source: str, include: str) -> Path:
    """Return the path of the library, and build it unless an earlier process has.

    It is written to a temporary folder and renamed, so that no process sees half of it.
    """
    flags = (*FLAGS, f"-I{include}") if include else FLAGS
    key = hashlib.sha256("\n".join([source, _compiler_version(), repr((flags, FASTEST_FIRST)), _cpu()]).encode())
    folder = _cache_folder()
    path = folder / f"{key.hexdigest()[:32]}.so"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        text, made = Path(aside) / "source.c", Path(aside) / "made.so"
        text.write_text(source)
        for speed in FASTEST_FIRST:
            command = [compiler(), *speed, *flags, str(text), "-o", str(made), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
            if done.returncode == 0:
                made.replace(path)
                return path
    raise BuildError(f"{compiler()} could not build: {done.stderr.strip()[:2000]}")


@cache
def _compiler_version() -> str:
    done = subprocess.run([compiler(), "--version"], capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    return compiler() + done.stdout


@cache
def _cpu() -> str:
    """Return what -march=native depends on: machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    )


@cache
def _cache_folder() -> Path:
    """Return the user's own cache folder: code is loaded from it, so no other user may write there."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(home) / "meshwright" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="meshwright-native-"))
