"""torchrun's command on every node, through an agent that keeps our exit codes (`torchrun_agent.py`).

Several nodes meet by torchrun's static rendezvous, not by c10d. c10d numbers nodes by their host names (PyTorch 2.13,
torch/distributed/elastic/rendezvous/dynamic_rendezvous.py sorts participants, run.py ignores --node-rank). A plan whose
nodes differ needs each in its own position.
"""

from __future__ import annotations

import re
import shlex

from meshwright.errors import InputError
from meshwright.launchers.placement import Alike, in_words
from meshwright.launchers.request import PORT, Request
from meshwright.launchers.vendors import visible

AGENT = ("python", "-m", "meshwright.launchers.torchrun_agent")


def torchrun(request: Request, some: Alike, *, node: str, address: str, port: str = str(PORT)) -> list[str]:
    """Return the arguments on one node; `node` is its number among all, `address` that of the first."""
    count = sum(each.nodes for each in request.nodes)
    start = [*AGENT, f"--nproc-per-node={some.per_node}"]
    if count == 1:
        start.append("--standalone")
    else:
        start += [f"--nnodes={count}", f"--node-rank={node}", f"--master-addr={address}", f"--master-port={port}"]
    return [*start, "-m", *request.command]


def script(request: Request, address: str = "") -> str:
    """Return one line to run on each node, for people and shells.

    >>> import meshwright as mw
    >>> from meshwright.run.options import Training
    >>> job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("1x4xh100"), 4, seq_len=32)
    >>> print(script(Request(job, mw.Plan.of({"dp": 4}, job), "p.json", Training(steps=5))), end="")
    # ranks 0-3: 1 node of 4 h100
    python -m meshwright.launchers.torchrun_agent --nproc-per-node=4 --standalone -m meshwright train --plan p.json --steps 5
    """
    every = request.nodes
    host, port = _parted(address) if sum(some.nodes for some in every) > 1 else ("", "")
    text = ""
    for some in every:
        text += f"# {in_words(request.job, some)}\n"
        seen = visible(request.job.cluster.groups[some.group].device, some)
        for i in range(some.nodes):
            words = torchrun(request, some, node=str(some.first_node + i), address=host, port=port)
            text += shlex.join([*(f"{name}={value}" for name, value in seen.items()), *words]) + "\n"
    return text


def _parted(address: str) -> tuple[str, str]:
    """Split an address into host and port."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]+)(?::([0-9]{1,5}))?", address)
    if not match or int(match[2] or PORT) > 65535:
        problem = f"'{address}' is no address" if address else "is needed for several nodes"
        raise InputError(problem, field="--address", valid="HOST or HOST:PORT of the first node, as the others see it")
    return match[1].strip("[]"), match[2] or str(PORT)
