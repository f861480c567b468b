"""Training steps of Llamas on one CUDA device, beside transformers' and beside the least that the device allows.

    python benchmarks/gpu_train.py [--shapes 1b,8b-16,8b] [--peer eager,compiled] [--long] [--mechanisms]

Random tokens, bfloat16, AdamW, one micro-batch per step. Ours: what `apply` builds of a plan for one device, 8-bit states,
updates in the backward pass. The peer: `LlamaForCausalLM`, PyTorch's fused AdamW, checkpointing where nothing else fits.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_roofline import PEAK, floor, flops
from torch.nn import functional

import meshwright as mw
from meshwright.models.presets import find_preset
from meshwright.run.optimizers import step_in_backward
from meshwright.run.optimizers.choose import optimizer_for
from meshwright.run.parallel.apply import apply
from meshwright.run.parallel.parallel_model import Parallel
from meshwright.run.parallel.stage import next_tokens
from meshwright.run.torch_private import grow_segments

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """What is trained."""

    preset: str
    samples: int
    length: int
    layers: int = 0  # 0: all

    @property
    def config(self) -> dict[str, Any]:
        found = dict(find_preset(self.preset).config)
        found["head_dim"] = found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
        found["num_hidden_layers"] = self.layers or found["num_hidden_layers"]
        return found | {"max_position_embeddings": max(self.length, found["max_position_embeddings"])}


SHAPES = {
    "1b": Shape("llama3.2-1b", 2, 8192),
    "8b-16": Shape("llama3-8b", 1, 8192, layers=16),
    "8b": Shape("llama3-8b", 1, 8192),
}


def drawn(key: str, shape: Sequence[int]) -> torch.Tensor:
    """First values, on the device: faster than `apply`'s own streams."""
    return torch.ones(*shape) if len(shape) == 1 else torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02


def job_of(shape: Shape, gib: float = 0.0) -> mw.Job:
    """On one device, of which only so much memory may be used."""
    cluster = mw.Cluster.preset("1xh200")
    if gib:
        (group,) = cluster.groups
        group = replace(group, device=replace(group.device, memory=int(gib * GIB)))
        cluster = replace(cluster, groups=(group,))
    return mw.Job(mw.Model.from_config(shape.config), cluster, global_batch=shape.samples, seq_len=shape.length)


def built(shape: Shape, strategy: dict[str, Any] | mw.Plan) -> Parallel:
    """By a plan for one device."""
    job = job_of(shape)
    plan = strategy if isinstance(strategy, mw.Plan) else mw.Plan.of({"micro_batches": 1, **strategy}, job)
    return apply(job.model, plan, device="cuda", dtype=torch.bfloat16, values=drawn)


def timed(step: Callable[[], float], warm: int = 3, steps: int = 6) -> tuple[float, float, float]:
    """Median seconds of a step, the most memory in bytes, the last loss."""
    for _ in range(warm):
        loss = step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        loss = step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times), torch.cuda.max_memory_allocated(), loss


def ours(
    shape: Shape, strategy: dict[str, Any] | mw.Plan, *, optimizer: str = "adamw-8bit", chunked: bool = True,
    inside: bool = True, steps: int = 6,
) -> tuple[float, float, float]:  # fmt: skip
    """With and without the logits in pieces, and updates inside the backward pass."""
    part = built(shape, strategy)
    chosen = optimizer_for(optimizer, part, 1e-4, 0.01)
    if inside:
        step_in_backward(chosen)
    tokens = torch.randint(0, shape.config["vocab_size"], (shape.samples, shape.length), device="cuda")
    batches = part.micro_batches(tokens)

    def step() -> float:
        if chunked:
            loss = part.step(batches, tokens.numel()).loss
        else:
            logits = part.spans[0].decoder(tokens).float().flatten(0, 1)
            targets = next_tokens(tokens).flatten()
            whole = functional.cross_entropy(logits, targets, reduction="sum") / tokens.numel()
            whole.backward()
            loss = float(whole.detach())
        if not inside:
            chosen.step()
            chosen.zero_grad()
        return loss

    return timed(step, warm=min(steps, 3), steps=steps)


def peer(shape: Shape, *, compiled: bool, checkpointed: bool) -> tuple[float, float, float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("cuda"):
        model = LlamaForCausalLM._from_config(
            LlamaConfig(**shape.config), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.config.use_cache = False
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, shape.config["vocab_size"], (shape.samples, shape.length), device="cuda")
    run = torch.compile(model, dynamic=False) if compiled else model

    def step() -> float:
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return timed(step)


def clear() -> None:
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def row(name: str, shape: Shape, found: tuple[float, float, float]) -> str:
    seconds, peak, loss = found
    tokens = shape.samples * shape.length
    share = flops(shape.config, shape.samples, shape.length) / seconds / PEAK
    rates = f"{1e3 * seconds:9.1f} ms{tokens / seconds:10,.0f} tok/s{share:7.1%} MFU"
    return f"{name:44}{rates}{peak / GIB:8.1f} GiB  loss {loss:.3f}"


def attempt(name: str, shape: Shape, work: Callable[[], tuple[float, float, float]]) -> tuple[float, float] | None:
    """Print a row; nothing where memory does not suffice."""
    clear()
    try:
        found = work()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error.__cause__ or error, torch.OutOfMemoryError):
            raise
        print(f"{name:44} does not fit", flush=True)
        return None
    print(row(name, shape, found), flush=True)
    return found[:2]


def compare(name: str, kinds: list[str]) -> None:
    """One shape: ours, the peer's kinds, and the least time."""
    shape = SHAPES[name]
    print(
        f"\n{name}: {shape.preset}, {shape.samples} x {shape.length} tokens, {shape.config['num_hidden_layers']} layers"
    )
    clear()
    parameters = mw.Model.from_config(shape.config).parameters
    least = floor(shape.config, shape.samples, shape.length, parameters)
    print(
        f"least {1e3 * least.total:.1f} ms: products {1e3 * least.matmul:.1f}, attention {1e3 * least.attention:.1f}, "
        f"memory {1e3 * least.bytes:.1f}"
    )
    mine = attempt("meshwright", shape, lambda: ours(shape, {}))
    others = []
    for kind in kinds:
        for again in (False, True):
            label = f"transformers {kind}" + (", checkpointed" if again else "")
            found = attempt(label, shape, lambda k=kind, a=again: peer(shape, compiled=k == "compiled", checkpointed=a))  # type: ignore[misc]
            if found:
                others.append(found)
                break
    if mine:
        print(f"{least.total / mine[0]:.1%} of the least time's speed", flush=True)
        if others:
            best = min(others)
            print(f"{best[0] / mine[0]:.2f}x the peer's speed with {mine[1] / best[1]:.0%} of its memory", flush=True)


def mechanisms() -> None:
    """Each on and off: what it costs and what it saves."""
    host = {"offload": {"activations": 0.25}}
    rows: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("1b", "AdamW, logits whole", {}, {"optimizer": "adamw", "chunked": False, "inside": False}),
        ("1b", "AdamW, chunked loss", {}, {"optimizer": "adamw", "inside": False}),
        (
            "1b",
            "... half its states on the host",
            {"offload": {"optimizer": 0.5}},
            {"optimizer": "adamw", "inside": False},
        ),
        ("1b", "8-bit AdamW", {}, {"inside": False}),
        ("1b", "8-bit AdamW in backward", {}, {}),
        ("8b-16", "8-bit AdamW in backward", {}, {}),
        ("8b-16", "... a quarter of activations on host", host, {}),
        ("8b-16", "... norms repeated", {"recompute": ("norm",)}, {}),
        ("8b-16", "... selective", {"recompute": "selective"}, {}),
        ("8b-16", "... gate and up too", {"recompute": ("norm", "activation", "gate", "up")}, {}),
        ("8b-16", "... whole blocks", {"recompute": "full"}, {}),
        ("8b-16", "... their inputs on the host", {"recompute": "full", "offload": {"activations": 1.0}}, {}),
    ]
    print("\nmechanisms")
    for name, title, strategy, how in rows:
        shape = SHAPES[name]
        attempt(f"{name} {title}", shape, lambda s=shape, p=strategy, h=how: ours(s, p, steps=3, **h))  # type: ignore[misc]


def long() -> None:
    """A 1B-wide model at 131,072 tokens under what the planner answers for so much memory, with AdamW as it is."""
    shape = Shape("llama3.2-1b", 1, 131_072)
    print("\n1b, 1 x 131,072 tokens, AdamW")
    whole = torch.cuda.mem_get_info()[1]
    for gib in (0.0, 80.0, 40.0, 24.0):
        job = job_of(shape, gib)
        plan = mw.plan(job)
        promised = mw.estimate(job, plan)
        spans = [span for stage in plan.pipelines[0].stages for span in stage.spans]
        away = {
            name: max(getattr(s.offload, name) for s in spans) for name in ("activations", "optimizer", "parameters")
        }
        said = ", ".join(f"{most:.0%} {name}" for name, most in away.items() if most) or "nothing"
        print(f"{job.cluster.groups[0].device.memory / GIB:.0f} GiB: at most on the host {said}; expected "
              f"{1e3 * promised.step_seconds:.0f} ms, {promised.peak_memory / GIB:.1f} GiB")  # fmt: skip
        torch.cuda.set_per_process_memory_fraction(min(job.cluster.groups[0].device.memory / whole, 1.0))
        attempt("meshwright", shape, lambda p=plan: ours(shape, p, optimizer="adamw", inside=False, steps=1))  # type: ignore[misc]
    torch.cuda.set_per_process_memory_fraction(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--peer", default="eager,compiled")
    parser.add_argument("--mechanisms", action="store_true")
    parser.add_argument("--long", action="store_true")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure", file=sys.stderr)
        return
    grow_segments()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for name in chosen.shapes.split(",") if chosen.shapes else []:
        compare(name, [kind for kind in chosen.peer.split(",") if kind])
    if chosen.mechanisms:
        mechanisms()
    if chosen.long:
        long()


if __name__ == "__main__":
    main()
