"""What hiding communication is worth: each mechanism on and off, in turns, in one run.

    python benchmarks/overlap.py [--rate 1gbit] [--steps 6]

Two processes on CPUs (gloo). Where it may (root, Linux, iproute2), the run moves into a network of its own whose loopback
carries `--rate`, so that communication takes time as on a real link and leaves the cores alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import meshwright as mw
from meshwright.run.optimizers.adamw import AdamW
from meshwright.run.parallel.apply import apply

CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 704, "max_position_embeddings": 256,
}  # fmt: skip
BATCH, LENGTH = 8, 128
WIDE = CONFIG | {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 2816}


def patchwork(*orders: list[str]) -> dict[str, Any]:
    """ZeRO 3 whose layers repeat different operators; spans whose axes lie in other orders are not joined."""
    spans = [{"layers": "embed", "dp": 2, "zero": 3}]
    for i in range(CONFIG["num_hidden_layers"]):
        for layer, repeated in (("attention", ["norm"]), ("mlp", [])):
            order = orders[len(spans) % len(orders)]
            spans.append({"layers": f"block.{i}.{layer}", "dp": 2, "zero": 3, "order": order, "recompute": repeated})
    spans.append({"layers": "norm..head", "dp": 2, "zero": 3})
    stage = {"devices": "0-1", "spans": spans}
    return {"pipelines": [{"batch": BATCH, "micro_batches": 2, "stages": [stage], "schedule": {"name": "1f1b"}}]}


_AXES = ["tp", "ulysses", "ring", "dp"]
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [  # off, on
    (
        "gradients under backward, plain replicas",
        {"dp": 2, "zero": 0, "overlap": {"gradients": False}},
        {"dp": 2, "zero": 0},
    ),
    ("gradients under backward, ZeRO 1", {"dp": 2, "zero": 1, "overlap": {"gradients": False}}, {"dp": 2, "zero": 1}),
    ("parameters ahead, ZeRO 3", {"dp": 2, "zero": 3, "overlap": {"parameters": False}}, {"dp": 2, "zero": 3}),
    ("parameters ahead across joined spans", patchwork(_AXES, _AXES[::-1]), patchwork(_AXES)),
    (
        "receives that do not wait, 1F1B",
        {"pp": 2, "micro_batches": 8, "overlap": {"pipeline": False}},
        {"pp": 2, "micro_batches": 8},
    ),
    (
        "tensor-parallel sums in 2 chunks",
        {"tp": 2, "sp": False},
        {"tp": 2, "sp": False, "overlap": {"tensor_chunks": 2}},
    ),
    ("gathers and scatters in 2 chunks", {"tp": 2, "sp": True}, {"tp": 2, "sp": True, "overlap": {"tensor_chunks": 2}}),
]


def plan_of(table: dict[str, Any], job: mw.Job) -> mw.Plan:
    if "pipelines" in table:
        return mw.Plan.of({"format": "meshwright-plan", "version": 1, "job": job.written(), **table}, job)
    return mw.Plan.of({"micro_batches": 2, **table}, job)


def work(rank: int, steps: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    tokens = torch.randint(0, 512, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    if rank == 0:
        print(f"{'mechanism':44}  off ms   on ms   gain")
    for name, off, on in CASES:
        model = mw.Model.from_config(WIDE if "tp" in on else CONFIG)
        job = mw.Job(model, mw.Cluster.preset("2xcpu"), BATCH, seq_len=LENGTH, precision="fp32")
        parts = [apply(model, plan_of(table, job)) for table in (off, on)]
        optimizers = [AdamW(part.parameters()) for part in parts]
        seconds: list[list[float]] = [[], []]
        for step in range(steps + 1):
            for i, (part, optimizer) in enumerate(zip(parts, optimizers, strict=True)):
                dist.barrier()
                begun = time.perf_counter()
                part.step(part.micro_batches(tokens), tokens.numel())
                optimizer.step()
                optimizer.zero_grad()
                if step:  # the first warms up
                    seconds[i].append(time.perf_counter() - begun)
        slow, fast = (statistics.median(some) for some in seconds)
        if rank == 0:
            print(f"{name:44}  {slow * 1e3:6.0f}  {fast * 1e3:6.0f}  {slow / fast:5.2f}x", flush=True)
    dist.destroy_process_group()


def shaped(rate: str) -> bool:
    """Whether the loopback of this network carries a rate now."""
    if os.geteuid() != 0 or not shutil.which("tc") or not shutil.which("ip"):
        return False
    done = [
        subprocess.run(command.split(), capture_output=True, check=False).returncode
        for command in ("ip link set lo up", f"tc qdisc add dev lo root tbf rate {rate} burst 128kb latency 2s")
    ]
    return not any(done)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of the loopback, as tc writes it")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if not chosen.inside and os.geteuid() == 0 and shutil.which("unshare"):
        os.execvp("unshare", ["unshare", "-n", sys.executable, __file__, *sys.argv[1:], "--inside"])
    link = f"a loopback of {chosen.rate}" if chosen.inside and shaped(chosen.rate) else "the loopback as it is"
    print(f"two processes of one thread, {link}; Llama of 6 layers, width 256 (tensor parallelism: 2, 1,024)")
    processes.spawn(work, (chosen.steps, 29511), nprocs=2)


if __name__ == "__main__":
    main()
