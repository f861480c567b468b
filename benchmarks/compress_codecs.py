"""How fast every codec encodes and decodes, against a copy on the same device in the same run,
for several sizes, tiles and warps; and one batch of many small gradients against a batch for each.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from meshwright.compression import codecs
from meshwright.compression.benchmark import CUDA, Bench, device_name, made, wall

NAMES = list(codecs())


def one_size(size: int, names: list[str], tile: int, warps: int, *, feedback: bool) -> None:
    bench = Bench(size, feedback=feedback)
    copy = bench.copy()
    tiles = f"tiles of {tile}" if tile else "usual tiles"
    title = f"{size >> 20} MiB, {tiles}, {warps} warps{', with a residual' if feedback else ''}"
    print(f"\n{title}: copy {copy / 1e9:.0f} GB/s\n{'codec':12} {'ratio':>7} {'encode':>14} {'decode':>14}")
    for name in names:
        one = bench.speed(name, tile=tile, warps=warps)
        shown = " ".join(f"{rate / 1e9:7.0f} {rate / copy:5.0%} " for rate in (one.encode_rate, one.decode_rate))
        print(f"{name:12} {one.ratio:7.1f} {shown} {one.encode * 1e6:8.0f} us {one.decode * 1e6:8.0f} us", flush=True)


def many_small(names: list[str], tile: int, warps: int, tensors: int = 1000) -> None:
    """One batch of many gradients against a batch for each."""
    sizes = [256 + i * 61 % 3840 for i in range(tensors)]
    device = "cuda" if CUDA else "cpu"
    flat = torch.randn(sum(sizes), device=device)
    print(f"\n{tensors} gradients of 1 to 16 KiB\n{'codec':12} {'at once':>10} {'one by one':>12} {'times':>7}")
    for name in names:
        batch = made(name, sizes, tile=tile, warps=warps)
        single = [made(name, [one], tile=tile, warps=warps) for one in sorted(set(sizes))]
        by_size = {one.counts[0]: one for one in single}
        parts = [(by_size[len(part)], part.clone()) for part in flat.split(sizes)]
        messages = {one.counts[0]: one.new_message() for one in single}
        message = batch.new_message()

        def separately(parts: Any = parts, messages: Any = messages) -> None:
            for one, part in parts:
                one.encode(part, messages[len(part)])

        together = wall(lambda b=batch, m=message: b.encode(flat, m), 20)
        alone = wall(separately, 3)
        print(f"{name:12} {together * 1e6:7.0f} us {alone * 1e6:9.0f} us {alone / together:6.0f}x", flush=True)


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
        from meshwright.compression.backends.triton.batch import WARPS

        tile, warps = 0, WARPS
    names = given.codecs.split(",")
    print(device_name())
    for size in map(int, given.mib.split(",")):
        for one in [int(word) for word in given.tiles.split(",") if word] or [tile]:
            for many in [int(word) for word in given.warps.split(",") if word] or [warps]:
                one_size(size << 20, names, one, many, feedback=given.feedback)
    many_small([name for name in names if codecs()[name].rounds == 1], tile, warps, 1000 if CUDA else 100)


if __name__ == "__main__":
    main()
