"""Times what a training step is made of on one accelerator, and writes the figures as JSON.

Matrix products over real layer shapes (bf16, fp8, grouped for mixtures), attention forward and backward, norms,
activation functions, cross entropy, the optimizer step, copies, and what a kernel costs that does nothing. Inputs are
random (zeros run faster than data does), rotated among several sets so that no cache serves them twice; each figure is
the median of repeated runs. The peer is the datasheet: every line prints the achieved part of the device's peak.

    python benchmarks/device_profile.py profile.json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

PEAK = {"bf16": 989.4e12, "fp8": 1978.9e12, "memory": 4.8e12}  # NVIDIA H200 SXM datasheet, dense
SETS = 3  # rotated inputs
Row = dict[str, Any]


def timed(run: Callable[[int], Any], repeats: int = 15) -> float:
    """Median seconds of one run; the argument picks the set of inputs. Short runs are timed in batches of 1 ms."""

    def batch(count: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for i in range(count):
            run(i % SETS)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    batch(SETS)
    count = max(SETS, min(200, int(1e-3 / batch(SETS)) + 1))
    return statistics.median(batch(count) for _ in range(repeats))


def random(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


def products() -> list[Row]:
    """tokens x k times k x n, as layers and their tensor-parallel cuts have them."""
    rows = []
    for m in (512, 1024, 2048, 4096, 8192, 16384):
        for k in (512, 1024, 2048, 4096, 8192, 16384):
            for n in (512, 1024, 2048, 4096, 8192, 14336, 28672):
                if m * k * n > 16384 * 8192 * 28672:
                    continue
                a, b = [random(m, k) for _ in range(SETS)], [random(n, k) for _ in range(SETS)]
                rows.append({"m": m, "k": k, "n": n, "bf16": timed(lambda i, a=a, b=b: a[i] @ b[i].t())})
                if m >= 1024 and k >= 1024 and n >= 1024:
                    rows[-1]["fp8"] = fp8_product(a, b)
    return rows


def fp8_product(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The product alone, inputs already in 8 bits, one scale per tensor."""
    one = torch.ones((), device="cuda")
    a8, b8 = [x.to(torch.float8_e4m3fn) for x in a], [x.to(torch.float8_e4m3fn) for x in b]
    return timed(
        lambda i: torch._scaled_mm(
            a8[i], b8[i].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    )


def grouped() -> list[Row]:
    """Experts' products: `rows` tokens for each of `experts`."""
    found = []
    for experts, k, n in ((8, 4096, 14336), (8, 7168, 4096), (16, 2048, 1536), (32, 7168, 4096), (32, 2048, 1536)):
        for rows in (64, 256, 1024, 4096):
            a = [random(experts * rows, k) for _ in range(SETS)]
            b = [random(experts, k, n) for _ in range(SETS)]
            ends = torch.arange(rows, experts * rows + 1, rows, device="cuda", dtype=torch.int32)
            seconds = timed(lambda i, a=a, b=b, ends=ends: functional.grouped_mm(a[i], b[i], offs=ends))
            found.append({"experts": experts, "rows": rows, "k": k, "n": n, "bf16": seconds})
    return found


def attention() -> list[Row]:
    rows = []
    for head_dim, heads, kv_heads in ((64, 32, 32), (128, 32, 32), (128, 32, 8), (128, 8, 8)):
        for seq in (1024, 2048, 4096, 8192, 16384, 32768):
            batch = max(16384 // seq, 1)
            q = [random(batch, heads, seq, head_dim, grad=True) for _ in range(SETS)]
            k = [random(batch, kv_heads, seq, head_dim, grad=True) for _ in range(SETS)]
            v = [random(batch, kv_heads, seq, head_dim, grad=True) for _ in range(SETS)]
            up = random(batch, heads, seq, head_dim)

            def forward(i: int, q: Any = q, k: Any = k, v: Any = v, gqa: bool = kv_heads != heads) -> torch.Tensor:
                return functional.scaled_dot_product_attention(q[i], k[i], v[i], is_causal=True, enable_gqa=gqa)

            with torch.no_grad():
                once = timed(forward)
            both = timed(lambda i, up=up, f=forward: f(i).backward(up))
            facts = {"head_dim": head_dim, "heads": heads, "kv_heads": kv_heads, "seq": seq, "batch": batch}
            rows.append({**facts, "forward": once, "backward": both - once})
    return rows


def memory_bound() -> list[Row]:
    """Seconds and the fewest bytes each must move; forward and backward apart."""
    rows = []
    for tokens, width in ((4096, 4096), (16384, 4096), (8192, 8192), (16384, 8192)):
        weight, bias = random(width, grad=True), random(width, grad=True)
        x = [random(tokens, width, grad=True) for _ in range(SETS)]
        y = [random(tokens, width, grad=True) for _ in range(SETS)]
        up = random(tokens, width)
        size = tokens * width * 2
        cases: dict[str, tuple[Callable[[int], torch.Tensor], int, int]] = {
            "layer_norm": (lambda i: functional.layer_norm(x[i], (width,), weight, bias), 2, 4),  # noqa: B023
            "rms_norm": (lambda i: functional.rms_norm(x[i], (width,), weight), 2, 4),  # noqa: B023
            "gelu": (lambda i: functional.gelu(x[i], approximate="tanh"), 2, 3),  # noqa: B023
            "add": (lambda i: x[i] + y[i], 3, 0),  # noqa: B023
        }
        for name, (run, reads, backward) in cases.items():
            with torch.no_grad():
                once = timed(run)
            row = {"op": name, "tokens": tokens, "width": width, "forward": once, "forward_bytes": reads * size}
            if backward:
                row |= {"backward": timed(lambda i, r=run, up=up: r(i).backward(up)) - once}
                row |= {"backward_bytes": backward * size}
            rows.append(row)
    return rows


def copies() -> Row:
    """Bytes per second inside the device, counting reads and writes, and to and from pinned host memory."""
    size, host_size = 2**30, 2**28
    to, source = (torch.empty(size, dtype=torch.uint8, device="cuda").random_() for _ in range(2))
    host = torch.empty(host_size, dtype=torch.uint8, pin_memory=True)
    part = to[:host_size]
    return {
        "copy_bytes_per_s": 2 * size / timed(lambda i: to.copy_(source)),
        "to_device_bytes_per_s": host_size / timed(lambda i: part.copy_(host, non_blocking=True)),
        "to_host_bytes_per_s": host_size / timed(lambda i: host.copy_(part, non_blocking=True)),
    }


def optimizer_step() -> Row:
    """Fused AdamW in float32: reads 16 and writes 12 bytes a parameter."""
    count = 2**29
    parameters = [torch.nn.Parameter(torch.randn(count // 2, device="cuda")) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return {"parameters": count, "seconds": timed(lambda i: optimizer.step()), "bytes": 28 * count}


def loss() -> Row:
    """Cross entropy over a large vocabulary, forward and backward, logits turned to float32."""
    tokens, vocab = 8192, 128256
    logits = [random(tokens, vocab, grad=True) for _ in range(SETS)]
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    seconds = timed(lambda i: functional.cross_entropy(logits[i].float(), labels).backward())
    return {"tokens": tokens, "vocab": vocab, "seconds": seconds}


def launches() -> Row:
    """What a kernel costs that does next to nothing, one by one and replayed from a graph."""
    tiny = torch.ones(1, device="cuda")

    def hundred(_: int) -> None:
        for _ in range(100):
            tiny.add_(1)

    one_by_one = timed(hundred) / 100
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hundred(0)
    return {"seconds": one_by_one, "seconds_in_graph": timed(lambda i: graph.replay()) / 100}


def report(profile: Row) -> None:
    """The achieved part of the datasheet's peak, for the shapes people know."""
    for row in profile["products"]:
        if row["m"] in (2048, 8192) and row["k"] in (1024, 4096, 8192) and row["n"] in (1024, 4096, 28672):
            flops = 2 * row["m"] * row["k"] * row["n"]
            parts = [f"{p} {flops / row[p] / PEAK[p]:.2f}" for p in ("bf16", "fp8") if p in row]
            print(f"product {row['m']:6}x{row['k']:6}x{row['n']:6}: of peak {', '.join(parts)}")
    for row in profile["attention"]:
        pairs = row["seq"] * (row["seq"] + 1) / 2
        flops = 4 * row["batch"] * row["heads"] * row["head_dim"] * pairs
        rates = f"{flops / row['forward'] / 1e12:.0f} forward, {2.5 * flops / row['backward'] / 1e12:.0f} backward"
        print(f"attention d{row['head_dim']} h{row['heads']}/{row['kv_heads']} s{row['seq']}: {rates} TFLOP/s")
    for row in profile["memory_bound"]:
        achieved = row["forward_bytes"] / row["forward"] / PEAK["memory"]
        print(f"{row['op']} {row['tokens']}x{row['width']}: {achieved:.2f} of memory bandwidth")
    for name in ("copies", "optimizer_step", "loss", "launches"):
        print(name, profile[name])


MEASUREMENTS: dict[str, Callable[[], Any]] = {
    "products": products,
    "grouped": grouped,
    "attention": attention,
    "memory_bound": memory_bound,
    "copies": copies,
    "optimizer_step": optimizer_step,
    "loss": loss,
    "launches": launches,
}


def main() -> None:
    if not torch.cuda.is_available():
        print("device_profile: skipped, torch sees no accelerator")
        return
    torch.manual_seed(0)
    profile: Row = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, measure in MEASUREMENTS.items():
        profile[name] = measure()
        torch.cuda.empty_cache()
        print(f"{name}: done", flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(profile))
    report(profile)


if __name__ == "__main__":
    main()
