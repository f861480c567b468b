"""Write arguments as a shell script that starts them on every node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.frameworks.contract import Inexpressible
from meshwright.frameworks.megatron.arguments import Arguments
from meshwright.plans import Job, Plan

_PLAIN = re.compile(r"[A-Za-z0-9_./:=@%^,+-]+")


@dataclass(frozen=True)
class Nodes:
    """Number of nodes, and of processes on each."""

    count: int
    processes: int


def nodes_of(job: Job, plan: Plan) -> Nodes:
    """Return whole nodes with equally many processes each."""
    sizes = {group.devices_per_node for group in job.cluster.groups}
    each = min(sizes)
    if plan.devices <= each:
        return Nodes(1, plan.devices)
    if len(sizes) > 1 or plan.devices % each:
        shown = " and ".join(map(str, sorted(sizes)))
        raise Inexpressible(f"{plan.devices} devices are not whole nodes of {shown}; torchrun starts as many on each")
    return Nodes(plan.devices // each, each)


def head(job: Job, what: str, how: Iterable[str]) -> list[str]:
    """Return the first lines of a script: its purpose, and how to start it."""
    batch = f"{job.global_batch:,} samples of {job.seq_len:,} tokens, {job.precision}, {job.optimizer}"
    lines = [f"{job.model.name} on {job.cluster.name}: {batch}", f"{what}, written by meshwright.", *how]
    return ["#!/usr/bin/env bash", *(f"# {line}".rstrip() for line in lines), "set -euo pipefail", ""]


def array(name: str, arguments: Arguments) -> list[str]:
    """Return an array with one argument per line.

    >>> array("MOE_ARGS", {"num-experts": ("8",), "moe-grouped-gemm": ()})
    ['MOE_ARGS=(', '    --num-experts 8', '    --moe-grouped-gemm', ')']
    """
    lines = [f"    --{key} {' '.join(map(quoted, words))}".rstrip() for key, words in arguments.items()]
    return [f"{name}=(", *lines, ")"]


def arrays(groups: Mapping[str, Arguments]) -> list[str]:
    """Return every nonempty group as an array."""
    return [line for name, arguments in groups.items() if arguments for line in array(name, arguments)]


def quoted(word: str) -> str:
    """Quote a word for the shell; a variable with a default stays one."""
    return word if _PLAIN.fullmatch(word) or word.startswith("${") else shlex.quote(word)


def torchrun(script: str, names: Sequence[str]) -> list[str]:
    """Return the command that all nodes run."""
    return [
        'torchrun --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" --node-rank "$NODE_RANK" \\',
        '    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \\',
        f'    "{script}" {" ".join(chr(34) + "${" + name + "[@]}" + chr(34) for name in names)} "$@"',
    ]


def launch_variables(nodes: Nodes) -> list[str]:
    return [
        f"NNODES=${{NNODES:-{nodes.count}}}",
        f"GPUS_PER_NODE=${{GPUS_PER_NODE:-{nodes.processes}}}",
        "NODE_RANK=${NODE_RANK:-0}",
        "MASTER_ADDR=${MASTER_ADDR:-localhost}",
        "MASTER_PORT=${MASTER_PORT:-29500}",
    ]
