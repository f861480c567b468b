"""What our own runtime takes, beside what the cost model said before: step time and peak memory of real training steps.

    python benchmarks/predict_own_runs.py [--cluster FILE] [--only NAME,...] [--json FILE]

On a CUDA device: Llamas of 1B to 8B width, several lengths, levels of recomputation and optimizers, one device. Elsewhere:
small models under plans of one to four processes on this machine, which is measured first for each number of them.
`--cluster` is what `meshwright measure` has written; without it the catalogue's curves are used on a device. The peer is
the prediction: each line prints both and the error.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.models.presets import find_preset
from meshwright.run.loop import advance, begin
from meshwright.run.options import Training
from meshwright.run.torch_private import grow_segments

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Case:
    """A job and a plan for it."""

    name: str
    preset: str
    samples: int
    length: int
    plan: dict[str, Any] = field(default_factory=dict)
    layers: int = 0  # 0: all
    optimizer: str = "adamw"
    processes: int = 1

    def job(self, cluster: mw.Cluster, precision: str) -> mw.Job:
        config = dict(find_preset(self.preset).config)
        layers = "n_layer" if "n_layer" in config else "num_hidden_layers"
        config[layers] = self.layers or config[layers]
        model = mw.Model.from_config(config, name=f"{self.preset}, {config[layers]} layers")
        return mw.Job(model, cluster, self.samples, self.length, precision, self.optimizer)


NORMS = ("norm", "activation", "gate", "up")
ONE_DEVICE = (
    Case("1b", "llama3.2-1b", 2, 8192),
    Case("1b, 8-bit states", "llama3.2-1b", 2, 8192, optimizer="adamw-8bit"),
    Case("1b, short", "llama3.2-1b", 32, 1024, {"micro_batches": 2}),
    Case("1b, one short sample", "llama3.2-1b", 1, 1024),
    Case("1b, long", "llama3.2-1b", 1, 65536, {"recompute": "selective"}),
    Case("1b, whole blocks", "llama3.2-1b", 8, 8192, {"recompute": "full", "micro_batches": 2}),
    Case("3b", "llama3.2-3b", 2, 4096, {"recompute": "selective"}),
    Case("3b, 16-bit states", "llama3.2-3b", 4, 8192, {"recompute": "full", "micro_batches": 2}, optimizer="adamw-16bit"),
    Case("8b wide", "llama3-8b", 1, 8192, layers=16),
    Case("8b wide, accumulated", "llama3-8b", 8, 4096, {"micro_batches": 4}, layers=8),
    Case("8b wide, long", "llama3-8b", 1, 32768, {"recompute": NORMS}, layers=8),
    Case("8b wide, sgd", "llama3-8b", 2, 8192, {"recompute": "selective", "micro_batches": 2}, 16, "sgd-momentum"),
    Case("8b", "llama3-8b", 1, 8192, optimizer="adamw-8bit"),
    Case("8b, whole blocks", "llama3-8b", 2, 8192, {"recompute": "full", "micro_batches": 2}, optimizer="adamw-8bit"),
    Case("13b wide", "llama2-13b", 2, 4096, {"recompute": "selective"}, layers=12),
    Case("gpt2-xl", "gpt2-xl", 16, 1024, {"micro_batches": 2}),
    Case("8b wide, on the host", "llama3-8b", 1, 16384, {"offload": {"activations": 0.5}}, layers=8),
    Case("1b, states on the host", "llama3.2-1b", 2, 8192, {"offload": {"optimizer": 0.5}}),
)  # fmt: skip

PROCESSES = (
    Case("llama", "tiny-llama", 16, 128),
    Case("gpt2", "tiny-gpt2", 16, 128),
    Case("mixture", "tiny-moe", 8, 128),
    Case("gpt2, 768 wide", "gpt2", 4, 256, layers=2),
    Case("llama, whole blocks", "tiny-llama", 16, 256, {"recompute": "full", "micro_batches": 2}),
    Case("dp 2", "tiny-llama", 16, 128, {"dp": 2, "zero": 0}, processes=2),
    Case("dp 2, ZeRO 3", "tiny-llama", 16, 128, {"dp": 2, "zero": 3}, processes=2),
    Case("tp 2", "tiny-llama", 16, 128, {"tp": 2}, processes=2),
    Case("pp 2", "tiny-llama", 16, 128, {"pp": 2, "micro_batches": 4}, processes=2),
    Case("ring 2", "tiny-llama", 4, 512, {"ring": 2}, processes=2),
    Case("ulysses 2", "tiny-llama", 4, 512, {"ulysses": 2}, processes=2),
    Case("gpt2, 768 wide, dp 2", "gpt2", 4, 256, {"dp": 2, "zero": 1}, layers=2, processes=2),
    Case("dp 4", "tiny-llama", 16, 128, {"dp": 4, "zero": 1}, processes=4),
    Case("dp 2, tp 2", "tiny-llama", 16, 128, {"dp": 2, "tp": 2}, processes=4),
    Case("pp 2, dp 2", "tiny-llama", 16, 128, {"pp": 2, "dp": 2, "micro_batches": 4}, processes=4),
    Case("pp 4", "tiny-llama", 16, 128, {"pp": 4, "micro_batches": 8}, processes=4),
)


def drawn(key: str, shape: Sequence[int]) -> torch.Tensor:
    """First values, on the device: faster than the runtime's own streams."""
    return torch.ones(*shape) if len(shape) == 1 else torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02


def on_device(case: Case, job: mw.Job, plan: mw.Plan) -> dict[str, float]:
    """Median seconds of a step, and the most memory: of tensors, of the allocator, of the whole process."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    loop = begin(job, plan, Training(steps=9, data="synthetic"), "cuda", drawn)
    tokens = torch.randint(0, 30000, (case.samples, case.length), device="cuda")
    batches = loop.part.micro_batches(tokens)
    times = []
    for step in range(9):
        start = time.perf_counter()
        advance(loop, batches, step, stop=False)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    free, whole = torch.cuda.mem_get_info()
    return {
        "seconds": statistics.median(times[3:]),
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "taken": whole - free,
    }


def compare(case: Case, cluster: mw.Cluster, precision: str) -> dict[str, Any]:
    job = case.job(cluster, precision)
    plan = mw.Plan.of({"micro_batches": 1, **case.plan}, job)
    promised = mw.estimate(job, plan)
    (memory,) = promised.memory
    found = on_device(case, job, plan)
    errors = promised.step_seconds / found["seconds"] - 1, memory.allocated / found["allocated"] - 1
    print(
        f"{case.name:26}{1e3 * promised.step_seconds:10.1f}{1e3 * found['seconds']:10.1f}{errors[0]:+8.1%}"
        f"{memory.allocated / GIB:9.1f}{found['allocated'] / GIB:9.1f}{errors[1]:+8.1%}"
        f"{memory.reserved / GIB:9.1f}{found['reserved'] / GIB:9.1f}{found['taken'] / GIB:9.1f}",
        flush=True,
    )
    predicted = {"seconds": promised.step_seconds, "allocated": memory.allocated, "reserved": memory.reserved}
    return {"case": asdict(case), "predicted": predicted, "measured": found}


def on_processes(only: list[str]) -> list[dict[str, Any]]:
    """Measure this machine as one, two and four processes, and train small models on each."""
    from meshwright.measurement.measure import measure

    rows = []
    print(f"{'':28}{'threads':>8}{'said ms':>10}{'took':>9}{'':8}{'said MiB':>10}{'took':>9}{'':8}{'tensors':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for count in (1, 2, 4):
            cases = [case for case in PROCESSES if case.processes == count and (not only or case.name in only)]
            if not cases:
                continue
            path = f"{folder}/{count}.toml"
            measure(path, count)
            plans = [mw.Plan.of({"micro_batches": 1, **c.plan}, c.job(mw.Cluster.load(path), "fp32")) for c in cases]
            promises = [mw.estimate(plan.resolve(), plan) for plan in plans]
            # Minutes apart, for other work comes and goes on a shared machine: the least disturbed of three counts.
            runs = [[_trained(plan, f"{folder}/plan.json") for plan in plans] for _ in range(3)]
            for case, promised, *found in zip(cases, promises, *runs, strict=True):
                seconds = min(one[0] for one in found)
                process, tensors = found[0][1:]
                memory = promised.memory[0].total
                print(
                    f"{count} x {case.name:24}{_threads(count):8}{1e3 * promised.step_seconds:10.1f}{1e3 * seconds:9.1f}"
                    f"{promised.step_seconds / seconds - 1:+8.1%}{memory / MIB:10.0f}{process / MIB:9.0f}"
                    f"{memory / process - 1:+8.1%}{tensors / MIB:9.0f}",
                    flush=True,
                )
                predicted = {"seconds": promised.step_seconds, "process": memory}
                rows.append({"case": asdict(case), "predicted": predicted,
                             "measured": {"seconds": seconds, "process": process, "tensors": tensors}})  # fmt: skip
    return rows


def _threads(processes: int) -> int:
    """Return the threads of each of so many processes of this machine, by the runtime's own rule."""
    command = f"from meshwright.run.processes.threads import share_cores; print(share_cores({processes}))"
    return int(subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout)


def _trained(plan: mw.Plan, file: str) -> tuple[float, int, int]:
    """Return the median seconds of a step of a run of its own, and the most memory of rank 0: all of it, tensors."""
    plan.save(file)
    command = [sys.executable, "-m", "meshwright", "train", "--plan", file, "--steps", "14", "--lr", "1e-4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    last = steps[-1]
    times = [step["step_time_s"] for step in steps[4:]]
    return statistics.median(times), last["peak_memory_bytes"], last.get("peak_tensor_bytes", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", help="a cluster file that `meshwright measure` has written")
    parser.add_argument("--only", default="", help="names of cases, with semicolons")
    parser.add_argument("--json", help="write the rows to this file too")
    chosen = parser.parse_args()
    only = [name for name in chosen.only.split(";") if name]
    rows = on_one_device(chosen.cluster, only, chosen.json) if torch.cuda.is_available() else on_processes(only)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(rows, indent=1))
    for what in ("seconds", "allocated", "process"):
        errors = [abs(row["predicted"][what] / row["measured"][what] - 1) for row in rows if what in row["measured"]]
        if errors:
            print(f"{what}: largest error {max(errors):.1%}, mean {sum(errors) / len(errors):.1%}")


def on_one_device(cluster_file: str | None, only: list[str], kept: str | None) -> list[dict[str, Any]]:
    """One process on a CUDA device."""
    grow_segments()
    cluster = mw.Cluster.load(cluster_file or "local:1")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'':26}{'predicted':>10}{'ms':>10}{'':8}{'predicted':>9}{'GiB':>9}{'':8}{'reserved':>9}{'':9}{'taken':>9}")
    rows = []
    for case in ONE_DEVICE:
        if not only or case.name in only:
            rows.append(compare(case, cluster, "bf16"))
        if kept:
            Path(kept).write_text(json.dumps(rows, indent=1))
    return rows


if __name__ == "__main__":
    main()
