"""The front door of measuring: what is wrong is said before PyTorch is loaded and anything is timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.plans import Job

Tell = Callable[[str, int, int], None]  # what is measured now, how much is done, of how much


def measure(output: str, devices: int = 0, tell: Tell = lambda name, done, of: None) -> Cluster | None:
    """Measure this machine, and write a cluster file; returns the cluster in the process that wrote it."""
    check_output(output)
    from meshwright.measurement.worker import measure as work

    return work(output, devices, tell)


def check_output(output: str) -> None:
    """Whether a cluster file could be written there."""
    if not output.endswith(".toml"):
        raise InputError("is no .toml file", file=output, field="--output", valid="a path such as cluster.toml")
    if not Path(output).absolute().parent.is_dir():
        raise InputError("no such folder", file=str(Path(output).parent), field="--output")


def layers(job: Job, tell: Callable[[str], None] = lambda name: None) -> list[Any]:
    """Every sort of layer of a job's model, all its samples at once on one device: expected and seen."""
    from meshwright.measurement.worker import compared

    return compared(job, tell)
