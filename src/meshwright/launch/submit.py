"""Hand a job to the scheduler's own tool."""

from __future__ import annotations

import shutil
import subprocess

from meshwright.errors import InputError, MeshwrightError

_PATIENCE = 120  # seconds for a scheduler to take a job
_TOOLS = {"slurm": ["sbatch", "--parsable"], "kubernetes": ["kubectl", "apply", "--filename=-"]}


class NotTaken(MeshwrightError):
    """The scheduler did not take the job."""

    exit_code = 1


def submit(on: str, text: str) -> str:
    """What the tool says of the job: Slurm's number of it, Kubernetes' names."""
    tool, *options = _TOOLS[on]
    path = shutil.which(tool)
    if path is None:
        valid = f"--dry-run or --write FILE here, then {tool} where it is"
        raise InputError(f"{tool} is not on this machine", field=f"--on {on}", valid=valid)
    try:
        done = subprocess.run(
            [path, *options], input=text, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotTaken(f"{tool} has not answered for {_PATIENCE} seconds") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:500]
        raise NotTaken(f"{tool} did not take the job: {said or f'exit code {done.returncode}'}")
    return done.stdout.strip()
