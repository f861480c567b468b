"""Blocks of real models on the device at hand: measured forward and backward times beside the predicted ones.

    python benchmarks/blocks_on_device.py [--device h200] [--json FILE]

Needs an accelerator. A block is attention (grouped, rotary) and a gated feed-forward layer with RMS norms, compiled, in
bfloat16; weight gradients are added to 16-bit ones. Times are medians of steps that run back to back, as in training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import meshwright as mw
from meshwright.clusters import Cluster, device
from meshwright.cost.layers.collectives import Fabric
from meshwright.cost.layers.layer import Placement, layer_time
from meshwright.cost.layers.operators import Chip
from meshwright.cost.runtime import runtime
from meshwright.models.presets import find_preset

MODELS = ("llama3.2-1b", "llama3.2-3b", "llama3-8b", "llama2-13b", "llama3-70b")
SHAPES = ((1, 2048), (4, 2048), (1, 8192), (2, 8192), (1, 32768))  # samples, tokens


class Block(nn.Module):
    """One block of a Llama."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, size: int, width: int) -> None:
        super().__init__()
        self.shape = (heads, kv_heads, size)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * size, bias=False)
        self.proj = nn.Linear(heads * size, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 2 * width, bias=False), nn.Linear(width, hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads, size = self.shape
        parts = self.qkv(self.norms[0](x)).split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts)
        q, k = (_rotate(part, cos, sin) for part in (q, k))
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(context.transpose(1, 2).flatten(-2))
        gate, up = self.up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def measure(work: Callable[[], object], seconds: float = 0.4) -> float:
    """Median seconds of a piece of work, back to back."""
    for _ in range(5):
        work()
    torch.cuda.synchronize()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 7:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 3e3)
    return statistics.median(times)


def measured(name: str, samples: int, tokens: int) -> tuple[float, float]:
    """Seconds of the forward pass, and of both passes together."""
    facts = find_preset(name).config
    size = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
    block = Block(
        facts["hidden_size"],
        facts["num_attention_heads"],
        facts["num_key_value_heads"],
        size,
        facts["intermediate_size"],
    )
    torch.compiler.reset()  # each shape compiles for itself; past a limit PyTorch would run uncompiled
    block = torch.compile(block.to("cuda", torch.bfloat16), dynamic=False)  # type: ignore[assignment]
    x = torch.randn(samples, tokens, facts["hidden_size"], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    angle = torch.outer(torch.arange(tokens, device="cuda"), torch.rand(size // 2, device="cuda"))
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    gradient = torch.randn_like(x)

    def forward() -> None:
        with torch.no_grad():
            block(x, cos, sin)

    return measure(forward), measure(lambda: block(x, cos, sin).backward(gradient))


def predicted(name: str, samples: int, tokens: int, chip: Chip, fabric: Fabric) -> tuple[float, float]:
    model = mw.Model.preset(name)
    how = runtime("meshwright")
    times = [
        layer_time(layer, mw.Slice(samples, tokens), chip, fabric, how, Placement())
        for layer in model.layers
        if layer.block == "block.0"
    ]
    forward = sum(float(t.forward) for t in times)
    return forward, forward + sum(float(t.backward) for t in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="the catalogue's name; by default what the driver reports")
    parser.add_argument("--json", help="write the rows to this file too")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("no accelerator here: nothing to measure", file=sys.stderr)
        return
    name = chosen.device or torch.cuda.get_device_name()
    how = runtime("meshwright")
    chip, fabric = Chip.of(device(name), "bf16", how), Fabric.of(Cluster.preset(f"1x1x{device(name).name}").groups[0])
    rows, errors = [], []
    print(f"{'model':14}{'samples x tokens':>18}{'forward ms':>22}{'both ms':>22}{'error':>16}")
    for model in MODELS:
        for samples, tokens in SHAPES:
            real = measured(model, samples, tokens)
            ours = predicted(model, samples, tokens, chip, fabric)
            error = [o / r - 1 for o, r in zip(ours, real, strict=True)]
            errors.append(error[1])
            pairs = "".join(f"{1e3 * o:11.3f}{1e3 * r:11.3f}" for o, r in zip(ours, real, strict=True))
            print(f"{model:14}{samples:8} x {tokens:7}{pairs}{error[0]:+8.1%}{error[1]:+8.1%}", flush=True)
            rows.append({"model": model, "samples": samples, "tokens": tokens, "measured": real, "predicted": ours})
    mean = sum(map(abs, errors)) / len(errors)
    print(f"predicted, then measured; both passes: mean error {mean:.1%}, bias {sum(errors) / len(errors):+.1%}")
    if chosen.json:
        Path(chosen.json).write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
