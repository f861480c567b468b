"""What several test files share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
Run = Callable[..., subprocess.CompletedProcess[str]]
# Begun first: else one process would still be at one of them when the other has nothing left to do.
LONG = (
    "test_structure.py",
    "launchers/test_slurm.py",
    "launchers/test_ray.py",
    "launchers/test_ray_measure.py",
    "launchers/test_torchrun.py",
    "compression/test_triton.py",
    "cost/test_accuracy.py",
    "run/test_train.py",
    "run/test_planned.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path not in {ROOT / "tests" / name for name in LONG})


@pytest.fixture(autouse=True, scope="module")
def _pools() -> Iterator[None]:
    """Worlds of processes (tests/run/pool.py) end with the file that wanted them."""
    yield
    if pools := sys.modules.get("tests.run.pool"):
        pools.close_all()


@pytest.fixture
def meshwright(tmp_path: Path) -> Run:
    """Run the real command line in an empty folder."""

    def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from meshwright.cli import main; main()", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]

    return run
