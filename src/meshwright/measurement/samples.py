"""Kernels to time, on real shapes and random data: matmuls, attention, memory-bound kernels, updates, copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.measurement.timing import Timing, timed
from meshwright.run.torch_private import scaled_mm

# Bytes of inputs used in turn, so that no cache serves one twice, and the maximum number of sets.
_TURNS, _MOST = 2**26, 64
TYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Sample:
    """One timing, with the shape that a curve is fitted to."""

    kind: str
    facts: Mapping[str, float]
    timing: Timing

    @property
    def name(self) -> str:
        """Name of the sample for people.

        >>> Sample("product bf16", {"m": 1024, "k": 512, "n": 512}, Timing(1e-3, 0.1)).name
        'product bf16 m=1024 k=512 n=512'
        """
        return " ".join([self.kind, *(f"{key}={value:g}" for key, value in self.facts.items())])


@dataclass(frozen=True)
class Scale:
    """Size of the shapes: as large as the work that a device usually gets."""

    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    lengths: tuple[int, ...]  # attention
    heads: tuple[tuple[int, int], ...]  # (heads, head size)
    parameters: int  # optimizer step
    copied: int  # bytes
    larger: tuple[tuple[int, int], ...] = ()  # (tokens, width) of memory passes beyond any cache
    vocabulary: tuple[tuple[int, int, int], ...] = ()  # (tokens, width, vocabulary) of matmuls beyond the widths
    blocks: tuple[tuple[int, int], ...] = ()  # (width, tokens) of whole blocks


ACCELERATOR = Scale(
    (1024, 4096, 16384), (1024, 2048, 4096, 8192, 14336, 28672), (1024, 2048, 4096, 8192, 16384, 32768),
    ((32, 64), (32, 128), (8, 128)), 2**28, 2**28,
)  # fmt: skip
PROCESSOR = Scale(
    (64, 256, 1024, 4096), (32, 64, 128, 256, 512, 1024), (32, 64, 128, 256, 512), ((4, 16), (8, 32), (8, 64)), 2**22,
    2**24, ((16384, 1024), (32768, 1024), (65536, 1024)), ((512, 768, 16384), (1024, 512, 32768)),
    ((128, 512), (256, 1024), (512, 1024)),
)  # fmt: skip


def precisions(device: str) -> tuple[str, ...]:
    """Return the precisions in which the device can multiply."""
    if not device.startswith("cuda"):
        return ("fp32",)
    eight = torch.cuda.get_device_capability() >= (8, 9)
    return ("bf16", "fp8") if eight else ("bf16",) if torch.cuda.get_device_capability() >= (8, 0) else ("fp16",)


def products(device: str, scale: Scale, precision: str) -> Iterator[Sample]:
    """Time (m x k) @ (k x n) over real shapes: tokens by widths, and weight gradients, whose inner dimension is tokens."""
    kind = torch.bfloat16 if precision == "fp8" else TYPES[precision]
    largest = 4 * max(scale.tokens) * max(scale.widths) ** 2 // 8
    for m in scale.tokens:
        for k in scale.widths:
            for n in scale.widths[:: 2 if k > scale.widths[2] else 1]:
                if m * k * n > largest:
                    continue
                yield _product(device, kind, precision, m, k, n)
                if m == scale.tokens[-2]:
                    yield _product(device, kind, precision, k, m, n, across=True)
    for m, k, n in scale.vocabulary:
        yield _product(device, kind, precision, m, k, n)
        yield _product(device, kind, precision, n, m, k, across=True)


def _product(device: str, kind: torch.dtype, precision: str, m: int, k: int, n: int, *, across: bool = False) -> Sample:
    """Time one matmul. With `across` both inputs are transposed, as in weight gradients."""
    sets = max(3, min(_MOST, _TURNS // ((m + n) * k * kind.itemsize)))
    a = [torch.randn(m, k, device=device, dtype=kind) for _ in range(sets)]
    b = [torch.randn(n, k, device=device, dtype=kind) for _ in range(sets)]
    if across and precision != "fp8":  # the fp8 kernel accepts no transposed inputs
        a, b = ([x.t().contiguous().t() for x in side] for side in (a, b))
    turn = _turns(sets)
    if precision == "fp8":
        one = torch.ones((), device=device)
        low = [[x.to(torch.float8_e4m3fn) for x in side] for side in (a, b)]

        def run() -> Tensor:
            i = turn()
            left, right = low[0][i], low[1][i].t()
            return scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    else:

        def run() -> Tensor:
            i = turn()
            return a[i] @ b[i].t()

    return Sample(f"product {precision}", {"m": m, "k": k, "n": n}, timed(run, device))


def attention(device: str, scale: Scale, precision: str) -> Iterator[Sample]:
    """Time causal attention, the forward and the backward pass separately."""
    kind = TYPES[precision]
    for heads, size in scale.heads:
        for length in scale.lengths:
            batch = max(scale.lengths[-2] // length, 1)
            shape = (batch, heads, length, size)
            q, k, v = (torch.randn(shape, device=device, dtype=kind, requires_grad=True) for _ in range(3))
            up = torch.randn(shape, device=device, dtype=kind)

            def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

            with torch.no_grad():
                once = timed(forward, device)
            both = timed(lambda f=forward, up=up: f().backward(up), device)  # type: ignore[misc]
            facts = {"length": length, "heads": heads, "size": size, "batch": batch}
            yield Sample(f"attention forward {precision}", facts, once)
            behind = Timing(max(both.seconds - once.seconds, 1e-9), both.spread)
            yield Sample(f"attention backward {precision}", facts, behind)


def passes(device: str, scale: Scale) -> Iterator[Sample]:
    """Time memory-bound kernels; `bytes` is the least that each must move."""
    kind = torch.bfloat16 if device.startswith("cuda") else torch.float32
    shapes = [(tokens, width) for tokens in scale.tokens for width in scale.widths[1::2]]
    for tokens, width in [*shapes, *scale.larger]:
        x, y = (torch.randn(tokens, width, device=device, dtype=kind) for _ in range(2))
        weight = torch.ones(width, device=device, dtype=kind)
        moved = x.numel() * x.element_size()
        cases: dict[str, tuple[Callable[[], object], int]] = {
            "addition": (lambda x=x, y=y: torch.add(x, y), 3),  # type: ignore[misc]
            "activation": (lambda x=x: functional.silu(x), 2),  # type: ignore[misc]
            "norm": (lambda x=x, w=weight: functional.rms_norm(x, (len(w),), w), 2),  # type: ignore[misc]
        }
        for name, (run, times) in cases.items():
            yield Sample(name, {"bytes": times * moved}, timed(run, device))


def update(device: str, scale: Scale) -> Iterator[Sample]:
    """Time AdamW in float32 on the device and, if that is not the CPU, on the host: 28 bytes per parameter."""
    for where, count in ((device, scale.parameters), ("cpu", scale.parameters // 8)):
        weight = torch.nn.Parameter(torch.randn(count, device=where))
        weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.AdamW([weight], fused=True)
        optimizer.step()
        kind = "update" if where == device else "host update"
        yield Sample(kind, {"bytes": 28 * count}, timed(optimizer.step, where, 0.3))
        if device == "cpu":
            return


def copies(device: str, scale: Scale) -> Iterator[Sample]:
    """Time copies to and from pinned host memory."""
    if not device.startswith("cuda"):
        return
    here = torch.empty(scale.copied, dtype=torch.uint8, device=device).random_()
    host = torch.empty(scale.copied, dtype=torch.uint8, pin_memory=True)
    facts = {"bytes": scale.copied}
    yield Sample("copy to device", facts, timed(lambda: here.copy_(host, non_blocking=True), device))
    yield Sample("copy to host", facts, timed(lambda: host.copy_(here, non_blocking=True), device))


def copies_under_products(device: str, scale: Scale) -> Iterator[Sample]:
    """Time by how much each second of a copy to or from the host slows the matmuls that it overlaps with."""
    width = scale.widths[2]
    a = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    here, back = (torch.empty(scale.copied, dtype=torch.uint8, device=device) for _ in range(2))
    host, there = (torch.empty(scale.copied, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def products() -> None:
        for _ in range(60):
            torch.mm(a, a)

    def both() -> None:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[0]):
            here.copy_(host, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            there.copy_(back, non_blocking=True)
        products()
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    alone, together = timed(products, device, 0.5), timed(both, device, 0.5)
    copied = timed(lambda: here.copy_(host, non_blocking=True), device).seconds
    slower = (together.seconds - alone.seconds) / min(copied, alone.seconds)
    yield Sample("overlap", {"bytes": 2 * scale.copied}, Timing(max(slower, 1e-3), together.spread))


def kernels(device: str) -> Iterator[Sample]:
    """Time an almost empty kernel that the host does not have to issue: in a CUDA graph."""
    if not device.startswith("cuda"):
        return
    tiny, graph = torch.ones(1, device=device), torch.cuda.CUDAGraph()

    def many() -> None:
        for _ in range(100):
            tiny.add_(1)

    many()
    with torch.cuda.graph(graph):
        many()
    yield Sample("kernel", {"kernels": 100}, timed(graph.replay, device))


def _turns(sets: int) -> Callable[[], int]:
    state = [0]

    def turn() -> int:
        state[0] = (state[0] + 1) % sets
        return state[0]

    return turn


def memory_beside_tensors() -> int:
    """Return bytes of the driver and its kernels in a process on a CUDA device, before any communicator exists."""
    torch.cuda.synchronize()
    free, whole = torch.cuda.mem_get_info()
    return int(whole - free - torch.cuda.memory_reserved())
