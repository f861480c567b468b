"""An sbatch script for a plan: one task per rank; nodes that differ are components of a heterogeneous job.

srun starts the ranks itself. torchrun in between would receive every signal instead of them, and kill them 30 s later.
SLURM_PROCID is the rank: tasks are dealt out node by node (--distribution=block), and counted through all components
(Slurm, doc/html/heterogeneous_jobs.shtml, 'Examples').

How a job ends and resumes:

1. Slurm sends USR1 to the script before its time is over.
2. The script sends TERM to the ranks, which end after a whole step with a checkpoint.
3. The job is requeued, and its next start resumes from the checkpoint.

Slurm itself requeues a job that is preempted or loses a node.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.errors import STOPPED, InputError, shorten
from meshwright.launchers.placement import Alike
from meshwright.launchers.request import GRACE, Request
from meshwright.launchers.vendors import vendor_of, visible

_BODY = """
set -u
train=({train})  # the same Python on every node
export MASTER_ADDR=$(scontrol show hostnames "${nodes}" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))  # apart from other jobs on the node
export WORLD_SIZE={world} PYTHONUNBUFFERED=1

# In every task. Cores are shared out; NCCL and the data have threads of their own.
read -r -d '' task <<'END'
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=$1 OMP_NUM_THREADS=$((SLURM_CPUS_ON_NODE > $1 ? SLURM_CPUS_ON_NODE / $1 : 1))
shift
exec "$@"
END

{ending}echo "job $SLURM_JOB_ID: {world} processes, the first on $MASTER_ADDR; what they say is in" {logs}
srun {steps} &
"""

# `wait` returns early on a signal; only the end of srun counts.
_GO_ON = """step=$!
wait "$step"; code=$?
while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done
if [ -n "$over" ] && [ "$code" -eq {stopped} ]; then  # stopped early, with a checkpoint
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

_ASK = """# Before the time is over: a checkpoint, and back into the queue. TERM reaches the tasks without our help.
over=
trap 'over=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap : TERM

"""


@dataclass(frozen=True)
class Slurm:
    """Options of a Slurm site; partitions and constraints once for all nodes, or once for each kind."""

    account: str = ""
    partitions: Sequence[str] = ()
    constraints: Sequence[str] = ()
    time: str = ""

    def check(self) -> None:
        """Raise if a job has no more time than it gets to end in: it would never progress."""
        seconds = _seconds(self.time) if self.time else 2 * GRACE
        if seconds < 2 * GRACE:
            problem = f"'{self.time}' is too short: {GRACE} s before its end a run is asked to save"
            raise InputError(problem, field="--time", valid=f"{2 * GRACE // 60} minutes or more")


def script(request: Request, site: Slurm = Slurm()) -> str:  # noqa: B008 - frozen
    """Return the whole script; `sbatch` takes it as a file or from standard input."""
    site.check()
    request = request.started_again()
    every = request.nodes
    head = "#!/bin/bash\n" + "".join(f"# {line}\n" for line in request.lines)
    parts = [_directives(_common(request, site) if i == 0 else {}, _component(request, some, site))
             for i, some in enumerate(every)]  # fmt: skip
    again = bool(request.run.output)
    nodes = "SLURM_JOB_NODELIST" + ("_HET_GROUP_0" if len(every) > 1 else "")
    steps = " : \\\n    ".join(_step(request, some, i if len(every) > 1 else -1) for i, some in enumerate(every))
    body = _BODY.format(
        train=shlex.join([sys.executable, "-m", *request.command]), nodes=nodes, world=request.plan.devices, steps=steps,
        ending=_ASK if again else "", logs=shlex.quote(log_folder(request)),
    )  # fmt: skip
    return (
        head
        + "#SBATCH hetjob\n".join(parts)
        + body
        + (_GO_ON.replace("{stopped}", str(STOPPED)) if again else "wait $!\n")
    )


def _seconds(time: str) -> float:
    """Parse Slurm's times: minutes, minutes:seconds, hours:minutes:seconds, each also after days and a dash.

    >>> _seconds("90"), _seconds("01:30:00"), _seconds("1-0"), _seconds("UNLIMITED")
    (5400, 5400, 86400, inf)
    """
    if time.lower() in ("infinite", "unlimited"):
        return float("inf")
    match = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,7}(?::\d{1,2}){0,2})", time, re.ASCII)
    if not match:
        raise InputError(f"'{time}' is no time", field="--time", valid="MINUTES, HH:MM:SS or D-HH:MM:SS")
    parts = [int(part) for part in match[2].split(":")]
    if match[1]:  # days-hours[:minutes[:seconds]]
        units: tuple[int, ...] = (3600, 60, 1)
    else:
        units = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}[len(parts)]
    return int(match[1] or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def log_folder(request: Request) -> str:
    """Return the folder of the job's logs; Slurm does not create it."""
    return os.path.join(request.run.output, "logs") if request.run.output else "."


def _log(request: Request, name: str) -> str:
    """Return a log path with Slurm's patterns in its name only."""
    return os.path.normpath(os.path.join(log_folder(request).replace("%", "%%"), name))


def _directives(*options: dict[str, str]) -> str:
    given = {name: value for some in options for name, value in some.items()}
    for name, value in given.items():
        if not value.isprintable():
            raise InputError(f"'{shorten(value)}' holds characters that cannot be printed", field=f"--{name}")
    return "".join(f"#SBATCH --{name}{f'={shlex.quote(value)}' if value else ''}\n" for name, value in given.items())


def _common(request: Request, site: Slurm) -> dict[str, str]:
    """Return options that are given once; Slurm passes them on to the other components."""
    found = {"job-name": request.name, "chdir": os.getcwd(), "output": _log(request, "%j.log")}
    found |= {name: value for name, value in (("account", site.account), ("time", site.time)) if value}
    if request.run.output:
        found |= {"open-mode": "append", "requeue": "", "signal": f"B:USR1@{GRACE}"}
    return found


def _component(request: Request, some: Alike, site: Slurm) -> dict[str, str]:
    """Return options of one component. It takes whole nodes: a plan was priced on their links."""
    found = {"nodes": str(some.nodes), "ntasks-per-node": str(some.per_node), "exclusive": "", "mem": "0"}
    found |= dict(option.removeprefix("--").split("=") for option in _devices(request, some))
    for name, given in (("partition", site.partitions), ("constraint", site.constraints)):
        if value := for_group(given, some.group, len(request.job.cluster.groups), f"--{name}"):
            found[name] = value
    return found


def _devices(request: Request, some: Alike) -> list[str]:
    """Return options for the devices of a node; CPU nodes need none."""
    device = request.job.cluster.groups[some.group].device
    return [f"--gpus-per-node={some.size}"] if vendor_of(device).visible else []


def for_group(given: Sequence[str], group: int, groups: int, option: str) -> str:
    """Return the option of a group that was given once for all groups, or once for each.

    >>> for_group(["gpu"], 1, 2, "--partition"), for_group(["a100", "v100"], 1, 2, "--partition")
    ('gpu', 'v100')
    """
    if len(given) not in (0, 1, groups):
        valid = f"once for all, or {groups} times, in the order of the plan's cluster"
        raise InputError(f"was given {len(given)} times for {groups} groups of nodes", field=option, valid=valid)
    return given[group if len(given) > 1 else 0] if given else ""


def _step(request: Request, some: Alike, component: int) -> str:
    """Return srun's arguments for one component."""
    sizes = [f"--nodes={some.nodes}", f"--ntasks-per-node={some.per_node}", *_devices(request, some)]
    sizes += ["--distribution=block", "--cpu-bind=none", "--kill-on-bad-exit=1", "--open-mode=append"]
    sizes += [f"--output={_log(request, '%j-%N.log')}"]
    chosen = [f"--het-group={component}"] if component >= 0 else []
    seen = visible(request.job.cluster.groups[some.group].device, some)
    hide = ["env", *(f"{name}={value}" for name, value in seen.items())] if seen else []
    words = shlex.join([*chosen, *sizes, *hide, "bash", "-c"])
    return f'{words} "$task" - {some.per_node} "${{train[@]}}"'
