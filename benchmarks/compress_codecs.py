"""How fast every codec encodes and decodes, against a copy on the same device in the same run.

Bytes are those that the algorithm's passes read and write: every pass over the numbers reads them once, the last one writes
the message, decoding reads the message and writes the numbers. A sample of which a threshold is searched counts once: it is
so small that all rounds but the first find it in a cache. On a CUDA device all kernels of one call are captured in a
graph, so that the device is measured and not Python.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from meshwright.compress import codecs
from meshwright.compress.language import REDUCTIONS
from meshwright.compress.program import ROUNDS, Program, sampling, walk

CUDA = torch.cuda.is_available()
NAMES = [name for name, codec in codecs().items() if codec.rounds == 1]


def read_by_encoding(program: Program, numbers: int) -> int:
    """Bytes of float32 numbers that the passes of an encoding read."""
    looked = 0
    for one in program.encoding[:-1]:
        looked += numbers * any(node.op in REDUCTIONS and _reads(node) for node in one.reductions)
        for node in one.reductions:
            if node.op == "threshold" and _reads(node):
                looked += _looked_at(numbers, node.every)
    return 4 * (looked + numbers)


def _looked_at(numbers: int, every: int) -> int:
    """Numbers that the search of a threshold reads: on a CUDA device a sample, then all if all are wanted; else every round
    reads them."""
    if CUDA:
        from meshwright.compress.triton_search import GUESS

        return sampling(numbers, GUESS if every == 1 else every)[1] + (numbers if every == 1 else 0)
    step, seen = sampling(numbers, every)
    return seen if step > 1 else (1 + ROUNDS) * seen


def _reads(node: Any) -> bool:
    return any(one.op == "gradient" for one in walk(node))


def seconds(call: Callable[[], Any], repeats: int = 9) -> float:
    """Of one call: the median of some groups of them, after some that are not counted."""
    call()
    if not CUDA:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            call()
    return _on_device(graph.replay, repeats) / 5


def _on_device(call: Callable[[], Any], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def made(name: str, counts: list[int], tile: int, warps: int) -> Any:
    if not CUDA:
        return codecs()[name].batch(counts)
    from meshwright.compress.triton_backend import TritonBatch

    return TritonBatch(codecs()[name].program, counts, torch.device("cuda"), tile=tile, warps=warps)


def one_size(size: int, names: list[str], tile: int, warps: int, *, feedback: bool) -> None:
    numbers = size // 4
    device = "cuda" if CUDA else "cpu"
    flat, other = torch.randn(numbers, device=device), torch.empty(numbers, device=device)
    residual = torch.zeros(numbers, device=device) if feedback else None
    # A copy of 1 GiB by the driver reaches two thirds of what a kernel does (H200): the faster of the two counts.
    copies = (lambda: other.copy_(flat), lambda: torch.mul(flat, 1.0, out=other))
    copy = 2 * size / min(seconds(one) for one in copies)
    tiles = f"tiles of {tile}" if tile else "usual tiles"
    title = f"{size >> 20} MiB, {tiles}, {warps} warps{', with a residual' if feedback else ''}"
    print(f"\n{title}: copy {copy / 1e9:.0f} GB/s\n{'codec':12} {'ratio':>7} {'encode':>14} {'decode':>14}")
    for name in names:
        batch = made(name, [numbers], tile, warps)
        message = batch.new_message()
        encode = seconds(lambda b=batch, m=message: b.encode(flat, m, residual=residual))
        decode = seconds(lambda b=batch, m=message: b.decode(m, other))
        looked = read_by_encoding(batch.program, numbers)
        moved = looked + batch.bytes + (looked + size if feedback else 0)
        rates = [moved / encode, (size + batch.bytes) / decode]
        shown = " ".join(f"{rate / 1e9:7.0f} {rate / copy:5.0%} " for rate in rates)
        print(f"{name:12} {size / batch.bytes:7.1f} {shown} {encode * 1e6:8.0f} us {decode * 1e6:8.0f} us", flush=True)


def many_small(names: list[str], tile: int, warps: int, tensors: int = 1000) -> None:
    """One batch of many gradients against a batch for each."""
    sizes = [256 + i * 61 % 3840 for i in range(tensors)]
    device = "cuda" if CUDA else "cpu"
    flat = torch.randn(sum(sizes), device=device)
    print(f"\n{tensors} gradients of 1 to 16 KiB\n{'codec':12} {'at once':>10} {'one by one':>12} {'times':>7}")
    for name in names:
        batch = made(name, sizes, tile, warps)
        single = [made(name, [one], tile, warps) for one in sorted(set(sizes))]
        by_size = {one.counts[0]: one for one in single}
        parts = [(by_size[len(part)], part.clone()) for part in flat.split(sizes)]
        messages = {one.counts[0]: one.new_message() for one in single}
        message = batch.new_message()

        def separately(parts: Any = parts, messages: Any = messages) -> None:
            for one, part in parts:
                one.encode(part, messages[len(part)])

        together = _wall(lambda b=batch, m=message: b.encode(flat, m), 20)
        alone = _wall(separately, 3)
        print(f"{name:12} {together * 1e6:7.0f} us {alone * 1e6:9.0f} us {alone / together:6.0f}x", flush=True)


def _wall(call: Callable[[], Any], repeats: int) -> float:
    """Launches included: they are what is saved."""
    call()
    if CUDA:
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        if CUDA:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codecs", default=",".join(NAMES))
    parser.add_argument("--mib", default="64,256,1024" if CUDA else "16")
    parser.add_argument("--tiles", default="", help="sizes of tiles to try, such as 2048,4096,8192 (CUDA only)")
    parser.add_argument("--warps", default="", help="warps of a program to try, such as 4,8 (CUDA only)")
    parser.add_argument("--feedback", action="store_true", help="with a residual")
    given = parser.parse_args()
    tile, warps = 4096, 4
    if CUDA:
        from meshwright.compress.triton_backend import WARPS

        tile, warps = 0, WARPS
    names = given.codecs.split(",")
    print(torch.cuda.get_device_name() if CUDA else "CPU")
    for size in map(int, given.mib.split(",")):
        for one in [int(word) for word in given.tiles.split(",") if word] or [tile]:
            for many in [int(word) for word in given.warps.split(",") if word] or [warps]:
                one_size(size << 20, names, one, many, feedback=given.feedback)
    many_small(names, tile, warps, 1000 if CUDA else 100)


if __name__ == "__main__":
    main()
