"""Entry point of measuring: checks input before PyTorch is loaded and anything is timed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.clusters import Cluster
from meshwright.errors import InputError
from meshwright.plans import Job

Tell = Callable[[str, int, int], None]  # name of the measurement, work done, work in all


def measure(output: str, devices: int = 0, tell: Tell = lambda name, done, of: None) -> Cluster | None:
    """Measure this machine, and write a cluster file; returns the cluster in the process that wrote it."""
    check_output(output)
    from meshwright.measurement.worker import measure as work

    return work(output, devices, tell)


def check_output(output: str) -> None:
    """Raise if a cluster file cannot be written to `output`."""
    if not output.endswith(".toml"):
        raise InputError("is no .toml file", file=output, field="--output", valid="a path such as cluster.toml")
    if not Path(output).absolute().parent.is_dir():
        raise InputError("no such folder", file=str(Path(output).parent), field="--output")


def layers(job: Job, tell: Callable[[str], None] = lambda name: None) -> list[Any]:
    """Compare every kind of layer of a job's model, all its samples at once on one device: predicted and measured."""
    from meshwright.measurement.worker import compared

    return compared(job, tell)
