"""Slurm on one machine, as far as our scripts use it: sbatch, srun, scontrol and scancel in one file.

It follows Slurm's manual pages, not our code: it starts what the script's own #SBATCH lines ask for, counts tasks through
all components, sends signals to whom the manual says, and refuses options that it does not know. Nodes are addresses of the
loopback, so that they can be connected to. `$FAKE_SLURM` is a folder for its state.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STATE = Path(os.environ.get("FAKE_SLURM", "."))
JOB = "7"
KNOWN = {
    tool: set(names.split())
    for tool, names in (
        line.split(": ")
        for line in (Path(__file__).parent / "data/slurm-options.txt").read_text().splitlines()
        if line and line[0] != "#"
    )
}


def install(folder: Path) -> None:
    """The four commands in a folder for PATH."""
    for name in ("sbatch", "srun", "scontrol", "scancel"):
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {__file__} {name} "$@"\n')
        (folder / name).chmod(0o755)


def options_of(tool: str, words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Long options up to the first word that is none, and the rest."""
    found: dict[str, str] = {}
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0)[2:].partition("=")
        if name not in KNOWN[tool]:
            sys.exit(f"{tool}: unrecognized option '--{name}'")
        found[name] = value
    return found, words


def directives(script: str) -> list[dict[str, str]]:
    """The options of every component; those after the first command are not read."""
    found: list[dict[str, str]] = [{}]
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            words = shlex.split(line.removeprefix("#SBATCH "))
            if words == ["hetjob"]:
                found.append({})
            else:
                found[-1] |= options_of("sbatch", words)[0]
    return found


def sbatch(words: list[str]) -> int:
    """Queues the script from standard input, and runs it as often as it is requeued."""
    given, _ = options_of("sbatch", words)
    script = sys.stdin.read()
    components = directives(script)
    (STATE / "script").write_text(script)
    nodes, at = [], 1
    for each in components:
        nodes.append([f"127.0.0.{at + i}" for i in range(int(each["nodes"]))])
        at += int(each["nodes"])
    (STATE / "job.json").write_text(json.dumps({"components": components, "nodes": nodes}))
    log = components[0]["output"].replace("%j", JOB)
    output = open(log, "a")  # noqa: SIM115 - Slurm makes no folder for it either
    subprocess.Popen([sys.executable, __file__, "batch"], stdout=output, stderr=output, start_new_session=True)
    print(JOB if "parsable" in given else f"Submitted batch job {JOB}")
    return 0


def batch() -> int:
    job = json.loads((STATE / "job.json").read_text())
    environment = {**os.environ, "SLURM_JOB_ID": JOB}
    many = len(job["nodes"]) > 1
    for i, nodes in enumerate(job["nodes"]):
        environment[f"SLURM_JOB_NODELIST_HET_GROUP_{i}" if many else "SLURM_JOB_NODELIST"] = ",".join(nodes)
    while True:
        shell = subprocess.Popen(["bash", str(STATE / "script")], env=environment, cwd=job["components"][0]["chdir"])
        (STATE / "shell").write_text(str(shell.pid))
        code = shell.wait()
        if not (STATE / "requeued").exists():
            (STATE / "code").write_text(str(code))
            return 0
        (STATE / "requeued").rename(STATE / f"started-again-{time.time()}")


def srun(words: list[str]) -> int:
    """One task per process; parts of a heterogeneous step are divided by a lone colon."""
    job = json.loads((STATE / "job.json").read_text())
    tasks: list[Any] = []
    text = "\0".join(words)
    for at, part in enumerate(text.split("\0:\0")):
        given, command = options_of("srun", part.split("\0"))
        component = int(given.get("het-group", at))
        asked, nodes = job["components"][component], job["nodes"][component]
        assert (given["nodes"], given["ntasks-per-node"]) == (asked["nodes"], asked["ntasks-per-node"])
        for node in nodes:
            for local in range(int(given["ntasks-per-node"])):
                own = {"SLURM_PROCID": len(tasks), "SLURM_LOCALID": local, "SLURM_CPUS_ON_NODE": 1}
                environment = os.environ | {name: str(value) for name, value in own.items()}
                log = open(given["output"].replace("%j", JOB).replace("%N", node), "a")  # noqa: SIM115
                tasks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, preexec_fn=_fresh))
    (STATE / "tasks").write_text(" ".join(str(task.pid) for task in tasks))
    codes = [task.wait() for task in tasks]
    return max(abs(code) for code in codes)


def _fresh() -> None:
    """slurmstepd starts tasks, not the script, whose background jobs ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def scontrol(words: list[str]) -> int:
    if words[:2] == ["show", "hostnames"]:
        print("\n".join(words[2].split(",")))
    elif words == ["requeue", JOB]:
        (STATE / "requeued").touch()
    else:
        return 1
    return 0


def scancel(words: list[str]) -> int:
    """A signal goes to the steps of a job, with --batch to its script alone."""
    to_script = "--batch" in words
    name = next(re.fullmatch(r"--signal=(\w+)", word)[1] for word in words if word.startswith("--signal"))  # type: ignore[index]
    assert words[-1] == JOB
    for pid in (STATE / ("shell" if to_script else "tasks")).read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.Signals[f"SIG{name}"])
    return 0


if __name__ == "__main__":
    tool, arguments = sys.argv[1], sys.argv[2:]
    sys.exit(
        batch()
        if tool == "batch"
        else {"sbatch": sbatch, "srun": srun, "scontrol": scontrol, "scancel": scancel}[tool](arguments)
    )
