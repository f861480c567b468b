"""How fast plans are priced: layers under thousands of strategies at once, and whole plans.

    python benchmarks/cost_speed.py

The bars: 100,000 layer-strategy costs per second on one core, and a 405B model on 16,384 devices in under 50 ms. The
peer is pricing the same strategies one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

import meshwright as mw
from meshwright.cost.estimate import estimate
from meshwright.cost.layers.collectives import Fabric
from meshwright.cost.layers.layer import Placement, layer_time
from meshwright.cost.layers.operators import Chip
from meshwright.cost.runtime import runtime


def best_of(repeats: int, work: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs."""
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def candidates(count: int) -> mw.Slice:
    """Strategies drawn at random: degrees, sequence parallelism, micro-batches."""
    draw = np.random.default_rng(0)
    tp, ulysses, ring = (2 ** draw.integers(0, 4, count) for _ in range(3))
    return mw.Slice(
        2 ** draw.integers(0, 4, count), 8192, "bf16", tp, draw.integers(0, 2, count), ulysses, ring,
        2 ** draw.integers(0, 7, count), 1,
    )  # fmt: skip


def one_of(many: mw.Slice, i: int) -> mw.Slice:
    degrees = (getattr(many, name)[i].item() for name in ("tp", "sp", "ulysses", "ring", "ep"))
    return mw.Slice(many.micro_batch[i].item(), many.seq_len, many.precision, *degrees, 1)


def main() -> None:
    group, how = mw.Cluster.preset("2048x8xh100").groups[0], runtime("nemo")
    chip, fabric = Chip.of(group.device, "bf16", how), Fabric.of(group)
    count = 4096
    many = candidates(count)
    place = Placement(1, many.tp, many.tp * many.ulysses, 1)
    print(f"{'layer':28}{'one at a time /s':>18}{'at once /s':>14}{'ratio':>8}")
    for model, name in (
        ("llama3.1-405b", "block.0.attention"),
        ("llama3.1-405b", "block.0.mlp"),
        ("deepseek-v3", "block.9.moe"),
    ):
        layer = mw.Model.preset(model).layer(name)
        together = count / best_of(5, lambda layer=layer: layer_time(layer, many, chip, fabric, how, place))  # type: ignore[misc]
        singles = [one_of(many, i) for i in range(100)]

        def one_by_one(layer: mw.Layer = layer, singles: list[mw.Slice] = singles) -> None:
            for cut in singles:
                layer_time(layer, cut, chip, fabric, how, Placement(1, cut.tp, cut.tp * cut.ulysses, 1))

        apart = len(singles) / best_of(3, one_by_one)
        print(f"{model + ' ' + name.split('.')[-1]:28}{apart:18,.0f}{together:14,.0f}{together / apart:7.0f}x")

    job = mw.Job(mw.Model.preset("llama3.1-405b"), mw.Cluster.preset("2048x8xh100"), global_batch=2048, seq_len=8192)
    plan = mw.Plan.of({"tp": 8, "pp": 16, "virtual": 2, "ring": 2, "micro_batch": 1}, job)
    seconds = best_of(5, lambda: estimate(job, plan, "nemo"))
    print(f"\nllama3.1-405b on 16,384 devices: one estimate {seconds * 1e3:.1f} ms (bar 50 ms, {50e-3 / seconds:.1f}x)")


if __name__ == "__main__":
    main()
