"""Whether training with each codec reaches the loss of exact sums: a small character model, four processes' gradients.

    python benchmarks/compress_convergence.py [--steps 600] [--codecs int8,onebit] [--write table.json]

One process plays all four: each has its own batch and its own residual, every message is encoded and decoded for real, on
the GPU if there is one. All runs begin with the same weights and see the same data. "steps" is how many more steps than
exact sums it took to reach the loss that those have after half of the run, the price that `compress.decide` knows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
WITHIN = 0.02
EVERY = 10  # steps between looks at the validation loss
# Name, options, error feedback. Rounded at random, TernGrad's mean is right as it is: with feedback its few levels diverge.
RUNS: list[tuple[str, dict[str, Any], bool]] = [
    ("fp16", {}, True), ("bf16", {}, True), ("int8", {}, True), ("int4", {}, True), ("int2", {}, True),
    ("homomorphic", {}, True), ("onebit", {}, True), ("tbq", {}, True),
    ("terngrad", {"bits": 4}, False), ("terngrad", {"bits": 2}, False),
    ("dgc", {}, True), ("graddrop", {}, True), ("topk", {}, True), ("randomk", {"part": 0.1}, True), ("randomk", {}, True),
    ("powersgd", {"rank": 32}, True), ("powersgd", {"rank": 16}, True), ("powersgd", {"rank": 8}, True),
    ("powersgd", {"rank": 4}, True),
]  # fmt: skip

Mean = Callable[[list[Tensor], int], Tensor]  # from the gradients of all processes and the step to their mean


def exact(flats: list[Tensor], step: int) -> Tensor:
    return torch.stack(flats).mean(0)


def coded(name: str, options: dict[str, Any], shapes: list[tuple[int, ...]], device: Any, *, feedback: bool) -> Mean:
    """The mean of what the messages of all processes say."""
    from meshwright.compression import codec

    kind = codec(name, **options)
    if kind.rounds > 1:
        return low_rank(shapes, options["rank"], device)
    counts = [torch.Size(shape).numel() for shape in shapes]
    batch = kind.batch(counts, device)
    residuals = [torch.zeros(sum(counts), device=device) for _ in range(RANKS)]
    message = batch.new_message()

    def mean(flats: list[Tensor], step: int) -> Tensor:
        total = torch.zeros_like(flats[0])
        kept: list[Tensor | None] = list(residuals) if feedback else [None] * RANKS
        if kind.program.agrees is not None:
            agreed = []
            for flat, residual in zip(flats, kept, strict=True):
                batch.measure(flat, residual=residual)
                agreed.append(batch.agreed.clone())
            batch.agreed.copy_(torch.stack(agreed).amax(0))
        for rank, (flat, residual) in enumerate(zip(flats, kept, strict=True)):
            known = kind.program.agrees is not None
            batch.encode(flat, message, residual=residual, seed=RANKS * step + rank, agreed=known)
            batch.decode(message, total, add=True)
        return total / RANKS

    return mean


def low_rank(shapes: list[tuple[int, ...]], rank: int, device: Any) -> Mean:
    """PowerSGD with factors in 8 bits, as the synchroniser sends them."""
    from meshwright.compression import codec
    from meshwright.compression.powersgd.low_rank import LowRank

    members = [LowRank(shapes, rank, device) for _ in range(RANKS)]
    residuals = [torch.zeros(sum(members[0].counts), device=device) for _ in range(RANKS)]
    batches = [codec("int8").batch(counts, device) for counts in (members[0].firsts, members[0].seconds)]
    messages = [batch.new_message() for batch in batches]

    def said(which: int, factor: Tensor, lacks: Tensor | None = None) -> Tensor:
        out = torch.empty_like(factor)
        batches[which].encode(factor, messages[which], residual=lacks)
        batches[which].decode(messages[which], out)
        return out

    def mean(flats: list[Tensor], step: int) -> Tensor:
        lacks = [torch.zeros(sum(members[0].firsts), device=device) for _ in members]
        firsts = [
            said(0, low.first(flat, residual), lack)
            for low, flat, residual, lack in zip(members, flats, residuals, lacks, strict=True)
        ]
        left = torch.stack(firsts).mean(0)
        right = torch.stack([said(1, low.second(left)) for low in members]).mean(0)
        for low, lack in zip(members, lacks, strict=True):
            low.finish(right, lack)
        return flats[0]

    return mean


def trained(mean_of: Callable[[list[tuple[int, ...]]], Mean], steps: int, device: Any) -> list[float]:
    """The validation loss every few steps."""
    from benchmarks.compress_network import text

    module, data, loss, rate = text()
    module.to(device)
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=rate, fused=True)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    mean = mean_of([tuple(one.shape) for one in parameters])
    proofs = [tuple(one.to(device) for one in data(9, 10**6 + i)) for i in range(32)]
    losses = []
    for step in range(steps):
        flats = []
        for rank in range(RANKS):
            x, y = (one.to(device) for one in data(rank, step))
            gradients = torch.autograd.grad(loss(module(x), y), parameters)
            flats.append(torch.cat([one.flatten() for one in gradients]))
        parts = mean(flats, step).split([one.numel() for one in parameters])
        for one, part in zip(parameters, parts, strict=True):
            one.grad = part.view_as(one)
        optimizer.step()
        warm.step()
        if step % EVERY == EVERY - 1:
            with torch.no_grad():
                losses.append(float(torch.stack([loss(module(x), y) for x, y in proofs]).mean()))
    return losses


def smooth(losses: list[float]) -> list[float]:
    """Means of five: a single look is noisy."""
    return [sum(losses[max(i - 4, 0) : i + 1]) / len(losses[max(i - 4, 0) : i + 1]) for i in range(len(losses))]


def compared(losses: list[float], plain: list[float]) -> dict[str, float | None]:
    ours, theirs = smooth(losses), smooth(plain)
    target = theirs[len(theirs) // 2]
    reached = next((i for i, one in enumerate(ours) if one <= target), None)
    wanted = next(i for i, one in enumerate(theirs) if one <= target)
    steps = None if reached is None else (reached + 1) / (wanted + 1)
    return {"last": ours[-1], "against": ours[-1] / theirs[-1] - 1, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--codecs", help="some of them, by name")
    parser.add_argument("--write", type=Path, help="a file for all figures")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = asked.codecs.split(",") if asked.codecs else None
    plain = trained(lambda shapes: exact, asked.steps, device)
    print(f"{asked.steps} steps on {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}")
    print(f"{'codec':24} {'last loss':>10} {'against':>8} {'steps':>6} {'within 2 %':>11}")
    print(f"{'exact sums':24} {smooth(plain)[-1]:10.4f}")
    found: list[dict[str, Any]] = [{"codec": "exact", "losses": plain}]
    for name, options, feedback in RUNS:
        if names and name not in names:
            continue
        begin = time.perf_counter()

        def mean_of(shapes: Any, name: str = name, options: Any = options, feedback: bool = feedback) -> Mean:
            return coded(name, options, shapes, device, feedback=feedback)

        losses = trained(mean_of, asked.steps, device)
        row = compared(losses, plain)
        told = " ".join([name, *(f"{key}={value}" for key, value in options.items()), *([] if feedback else ["unfed"])])
        steps = "-" if row["steps"] is None else f"{row['steps']:.2f}"
        good = "yes" if (row["against"] or 0) <= WITHIN else "no"
        seconds = time.perf_counter() - begin
        told_of = f"{row['last']:10.4f} {row['against']:8.1%} {steps:>6} {good:>11} {seconds:8.0f} s"
        print(f"{told:24} {told_of}", flush=True)
        found.append({"codec": told, "losses": losses, **row})
    if asked.write:
        asked.write.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
