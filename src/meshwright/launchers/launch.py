"""Entry point of launching: turn a plan and a destination into the text of a job."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from meshwright.cost.estimate import Estimate
from meshwright.errors import InputError, MeshwrightError
from meshwright.launchers.placement import placement
from meshwright.launchers.request import Request
from meshwright.launchers.slurm import Slurm
from meshwright.plans import Plan
from meshwright.run.options import Training
from meshwright.run.train import check

# Commands that hand a job to the scheduler.


_PATIENCE = 120  # seconds for a scheduler to accept a job
_TOOLS = {"slurm": ["sbatch", "--parsable"], "kubernetes": ["kubectl", "apply", "--filename=-"]}


class NotTaken(MeshwrightError):
    """Error: the scheduler did not accept the job."""

    exit_code = 1


def submit(on: str, text: str) -> str:
    """Submit the job, and return what the scheduler prints: Slurm's job number, or Kubernetes' names."""
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


On = Literal["local", "torchrun", "slurm", "kubernetes", "ray"]
PLACES: tuple[On, ...] = ("local", "torchrun", "slurm", "kubernetes", "ray")
_PATHS = ("data", "output", "init_from", "export", "profile")  # fields of a run that name files


@dataclass(frozen=True)
class Where:
    """Destination of a run, with the options of its launcher."""

    on: On
    address: str = ""  # torchrun: of the first node; ray: of the cluster
    account: str = ""
    partition: Sequence[str] = ()
    constraint: Sequence[str] = ()
    time: str = ""
    image: str = ""
    mount: Sequence[str] = ()
    node_selector: Sequence[str] = ()
    kind: Literal["jobset", "pytorchjob"] = "jobset"


def requested(plan: Plan, file: str, run: Training, where: Where, name: str = "") -> tuple[Request, Estimate]:
    """Check a request as far as this machine can, and return it with the plan's estimate.

    Pods see volumes of their own, so their paths are not looked up on this machine. Ray's workers have another folder.
    """
    job = plan.resolve()
    promised = check(job, plan, run, here=where.on != "kubernetes")
    if where.on == "ray":
        absolute = {field: os.path.abspath(value) for field in _PATHS if _is_path(value := getattr(run, field))}
        run = msgspec.structs.replace(run, **absolute)
    return Request(job, plan, file, run, name), promised


def _is_path(value: str) -> bool:
    return bool(value) and value != "synthetic"


def written(request: Request, where: Where) -> str:
    """Return the job as text: a command, a script, manifests, or the resources that Ray is asked for.

    >>> import meshwright as mw
    >>> job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("2x4xh100"), 8, seq_len=32)
    >>> request, _ = requested(mw.Plan.of({"tp": 4}, job), "plan.json", Training(steps=5), Where("slurm"))
    >>> [line for line in written(request, Where("slurm")).splitlines() if "nodes" in line and "#SBATCH" in line]
    ['#SBATCH --nodes=2']
    """
    if where.on == "torchrun":
        from meshwright.launchers import torchrun

        return torchrun.script(request, where.address)
    if where.on == "slurm":
        from meshwright.launchers import slurm

        return slurm.script(request, Slurm(where.account, where.partition, where.constraint, where.time))
    if where.on == "kubernetes":
        from meshwright.launchers import kubernetes, pods

        return kubernetes.text(request, pods.ClusterOptions(where.image, where.mount, where.node_selector), where.kind)
    lines = "".join(f"# {line}\n" for line in request.lines)
    command = shlex.join(request.command) + "\n"
    if where.on == "local":
        return lines + command
    from meshwright.launchers.ray.driver import bundles

    asks = [", ".join(f"{count:g} {name}" for name, count in needs.items()) for needs in bundles(request)]
    nodes = "".join(f"# bundle {i}: {needs}\n" for i, needs in enumerate(asks))
    return f"{lines}{nodes}# one actor per rank runs\n{command}"


def facts(request: Request, where: Where) -> dict[str, Any]:
    """Return the launch as JSON values: ranks by node."""
    ranks = [{"rank": p.rank, "device": p.device, "group": p.group, "node": p.node, "local": p.local}
             for p in placement(request.job, request.plan)]  # fmt: skip
    return {"on": where.on, "name": request.name, "ranks": ranks}
