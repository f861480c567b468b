"""The same plan on every kind of cluster: what would be submitted, and which process runs on which device."""

import tempfile
from pathlib import Path

import meshwright as mw
from meshwright.launchers.launch import Where, requested, written
from meshwright.launchers.placement import placement
from meshwright.run.options import Training

model = mw.Model.preset("llama3-8b")
cluster = mw.Cluster.preset("2x8xa100-80gb+4x8xv100-32gb")
job = mw.Job(model, cluster, global_batch=96, seq_len=2048, precision="fp16")
stages = [
    {"layers": "embed..block.20", "devices": "0-15", "dp": 16},
    {"layers": "block.21..head", "devices": "16-47", "tp": 2},
]
plan = mw.Plan.of({"stages": stages, "micro_batches": 6}, job)
print(f"{model.name} on {plan.devices} devices of {cluster.name}")
for place in placement(job, plan)[14:18]:
    print(f"  rank {place.rank}: group {place.group}, node {place.node}, device {place.local}")

with tempfile.TemporaryDirectory() as folder:
    path = str(Path(folder) / "plan.json")
    plan.save(path)
    for where in (
        Where("torchrun", address="node01"),
        Where("slurm", partition=["a100", "v100"], time="04:00:00"),
        Where("kubernetes", image="registry/train:1", mount=["shared:/data"]),
        Where("ray"),
    ):
        request, promised = requested(plan, path, Training(steps=1000, save_every=100, output="/data/run"), where)
        text = written(request, where).replace(folder, "")
        print(f"\n--- {where.on}: {len(text.splitlines())} lines, {promised.step_seconds:.2f} s a step expected")
        shown = [line for line in text.splitlines() if "#SBATCH" in line or "torchrun" in line or "bundle" in line]
        print("\n".join(line.strip()[:150] for line in shown[:20]))
