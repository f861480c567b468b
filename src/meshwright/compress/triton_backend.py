"""Batches on CUDA devices: one launch for each pass, however many gradients there are.

Each gradient is cut into tiles; a table on the device, made once, tells a program which part of which gradient its tile is.
Nothing waits for the device, and all scratch memory is allocated when the batch is made, so that encoding and decoding
can be captured in a CUDA graph.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.compress.batch import Batch
from meshwright.compress.language import Node
from meshwright.compress.program import ROUNDS, Program, barriers, capacity, sampling, walk
from meshwright.compress.triton_source import source, sums
from meshwright.compress.triton_values import Shape

TILE, WARPS = 2048, 4
_COPIES = 64  # of the counters of a threshold: additions to one place wait for each other
_NAMES = count()


class TritonBatch(Batch):
    """Gradients that are encoded and decoded by generated kernels."""

    def __init__(
        self, program: Program, counts: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32,
        *, tile: int = TILE, warps: int = WARPS,
    ) -> None:  # fmt: skip
        super().__init__(program, counts, device, dtype)
        self._tile, self._warps = max(tile, program.block), warps
        self._shape, self._kernels = kernels(program, self._tile)
        self._last = program.encoding[-1]
        self._room = [capacity(one, self._part) if self._part else 0 for one in self.counts]
        lengths = np.array(self.counts, np.int64)
        self._tiles, first, many = self._tiling(lengths, self._tile)
        self._segments = self._table(
            np.array(self.starts[:-1]), lengths, np.array(self.places[:-1]), first, many, np.array(self._room),
            *(np.array(column) for column in self._fields()),
        )  # fmt: skip
        rooms = np.array(self._room, np.int64)
        self._decoded = self._tiling(rooms, self._tile, inside=True)[0] if self._part else self._tiles
        self._samples = {id(node): self._sample(node) for node in self._shape_nodes() if node.op == "threshold"}
        # Results of the tiles of a gradient are put together by one program: at once if they are few, by a wide one else.
        self._wide, self._joining = (1024, 4) if max(many, default=0) <= 1024 else (16384, 16)
        self._copies = min(_COPIES, 1 << int(max(many, default=0)).bit_length())
        self._scratch(len(self._tiles), len(self._shape.stats))
        aligned = int(np.gcd.reduce(np.array([16, *self.starts[:-1]])))
        self._aligned = aligned & -aligned

    @property
    def _part(self) -> float:
        return max((one.part for one in self.program.fields if one.over == "chosen"), default=0.0)

    def _fields(self) -> list[list[int]]:
        """Where each field of each gradient begins in the message."""
        layouts = [self.program.layout(one) for one in self.counts]
        pairs = list(zip(self.places, layouts, strict=False))
        return [[place + layout[one.name] for place, layout in pairs] for one in self.program.fields]

    def _shape_nodes(self) -> list[Node]:
        return [node for one in self.program.encoding for node in one.reductions]

    def _table(self, *columns: Any) -> Tensor:
        return torch.from_numpy(np.stack(columns, axis=1).astype(np.int64)).to(self.device)

    def _tiling(self, lengths: Any, size: int, *, inside: bool = False) -> tuple[Tensor, Any, Any]:
        """Tiles (where they, or with `inside` their gradient, begin in the buffer; gradient; where in it; how long), and for
        each gradient the first of them and how many."""
        many = -(-lengths // size)
        first = np.cumsum(many) - many
        which = np.repeat(np.arange(len(lengths)), many)
        start = (np.arange(many.sum()) - first[which]) * size
        at = np.array(self.starts[:-1], np.int64)[which] + (0 if inside else start)
        return self._table(at, which, start, np.minimum(lengths[which] - start, size)), first, many

    def _sample(self, node: Node) -> tuple[Tensor, Tensor]:
        """Tiles of what a threshold looks at, and of each gradient: first tile, tiles, numbers to reach it, step."""
        steps, seen = np.array([sampling(one, node.every) for one in self.counts], np.int64).reshape(-1, 2).T
        tiles, first, many = self._tiling(seen, self._shape.sampled, inside=True)
        reach = np.array([capacity(int(one), node.value) for one in seen], np.int64)
        return tiles, self._table(first, many, reach, steps)

    def _scratch(self, tiles: int, stats: int) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        gradients = len(self.counts)
        self._partial, self._stats = empty(stats + 1, max(tiles, 1)), empty(gradients, max(stats, 1))
        self._found, self._base = (empty(max(tiles, 1), dtype=torch.int32) for _ in range(2))
        self._bits = empty(tiles * self._tile // 8 if self._part else 0, dtype=torch.uint8)
        self._candidates = empty(gradients, 32)
        self._counters = empty(gradients, self._copies, 16, dtype=torch.int32)

    def measure(self, flat: Tensor, *, residual: Tensor | None = None) -> None:
        if self.program.agrees is not None:
            run = _Run(self, flat, self._found, residual, 0)
            self._before([self.program.agrees.args[0]], run, flag=False)
            self._agree()

    def encode(
        self, flat: Tensor, message: Tensor, *, residual: Tensor | None = None, seed: int = 0, agreed: bool = False
    ) -> None:
        self.check(message, flat, residual)
        if not self.counts:
            return
        run = _Run(self, flat, message, residual, seed)
        agrees = self.program.agrees
        if agrees is not None and not agreed:
            self._before([agrees.args[0]], run, flag=False)
            self._agree()
        run.flagged = False
        self._before([one.node for one in self._last.fields], run, flag=True)
        self._write(run)

    def _agree(self) -> None:
        if self.counts:
            self._kernels["agree"][(len(self.counts),)](self.agreed, self._segments, self._stats, num_warps=1)

    def _before(self, wanted: list[Node], run: _Run, *, flag: bool) -> None:
        """Statistics that some values need; what was agreed on needs nothing any more."""
        needed = {id(node) for node in barriers(known(wanted))}
        for one in self.program.encoding[:-1]:
            if any(id(node) in needed for node in sums(one)):
                flags = flag and not run.flagged
                run.over(f"reduce_{one.level}", self._tiles, flag=flags)
                self._kernels[f"finish_{one.level}"][(len(self.counts),)](
                    run.message,
                    self._segments,
                    self._partial,
                    self._stats,
                    len(self._tiles),
                    flags,
                    self._wide,
                    num_warps=self._joining,
                )
                run.flagged |= flags
            for node in one.reductions:
                if node.op == "threshold" and id(node) in needed:
                    self._threshold(node, run)

    def _threshold(self, node: Node, run: _Run) -> None:
        tiles, sample = self._samples[id(node)]
        slot, grid = self._shape.stats[id(node)], (len(self.counts),)
        run.over(f"top_{slot}", tiles, sample=sample)
        self._kernels["begin"][grid](sample, self._partial, self._candidates, self._wide, num_warps=self._joining)
        for turn in range(ROUNDS):
            run.over(
                f"try_{slot}",
                tiles,
                flag=turn == 0,
                sample=sample,
                found=self._counters,
                base=self._candidates,
                more=(self._copies,),
            )
            self._kernels["narrow"][grid](
                sample, self._counters, self._candidates, self._stats, self._stats.shape[1], slot, self._copies,
                turn == 0, turn == ROUNDS - 1, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip

    def _write(self, run: _Run) -> None:
        grid, width = (len(self.counts),), self._shape.width
        if self._last.choice is not None:
            self._collect(run)
            return
        run.over("write_message", self._tiles, flag=not run.flagged)
        if not run.flagged:
            self._kernels["heads"][grid](
                run.message, self._segments, self._partial, width, self._wide, num_warps=self._joining
            )

    def _collect(self, run: _Run) -> None:
        """Count the chosen numbers of every tile, find where each tile writes, and write."""
        flags = not run.flagged
        run.over("count", self._tiles, flag=flags, message=self._bits)
        self._kernels["scan"][(len(self.counts),)](
            run.message,
            self._segments,
            self._partial,
            self._found,
            self._base,
            flags,
            self._shape.width,
            self._wide,
            num_warps=self._joining,
        )
        if len(self._tiles):
            self._kernels["collect"][(len(self._tiles),)](
                run.flat, run.flat if run.residual is None else run.residual, run.message, self.agreed, self._tiles,
                self._segments, self._stats, self._bits, self._base, run.seed, run.residual is not None, num_warps=1,
            )  # fmt: skip

    def decode(self, message: Tensor, out: Tensor, *, add: bool = False) -> None:
        self.check(message, out, out=True)
        if self._part and not add:
            out.zero_()
        if len(self._decoded):
            self._kernels["decode"][(len(self._decoded),)](
                message, out, self.agreed, self._decoded, self._segments, add, self._aligned, num_warps=self._warps
            )


class _Run:
    """One encoding: what its kernels are given."""

    def __init__(self, batch: TritonBatch, flat: Tensor, message: Tensor, residual: Tensor | None, seed: int) -> None:
        self.batch, self.flat, self.message, self.residual = batch, flat, message, residual
        mixed = seed * 0x85EBCA77 & 0xFFFFFFFF
        self.seed = mixed - (1 << 32) if mixed >= 1 << 31 else mixed
        self.flagged = False

    def over(
        self, name: str, tiles: Tensor, *, flag: bool = False, sample: Tensor | None = None,
        found: Tensor | None = None, base: Tensor | None = None, message: Tensor | None = None, more: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Launch a kernel over tiles."""
        if not len(tiles):
            return
        its = self.batch
        its._kernels[name][(len(tiles),)](
            self.flat, self.flat if self.residual is None else self.residual,
            self.message if message is None else message, its.agreed, tiles,
            its._segments, its._segments if sample is None else sample, its._partial, its._stats,
            its._found if found is None else found, its._base if base is None else base, self.seed, its._partial.shape[1],
            *more, flag, self.residual is not None, its._aligned, num_warps=its._warps,
        )  # fmt: skip


def known(nodes: list[Node]) -> list[Node]:
    """Values that must be computed for some: those below an agreed one need not."""
    found: list[Node] = []
    for node in nodes:
        if node.op != "agreed":
            below = known(list(node.args))
            found += below if any(arg.op == "agreed" for arg in walk(node)) else [node]
    return found


@cache
def kernels(program: Program, tile: int) -> tuple[Shape, dict[str, Any]]:
    """The kernels of a program, by name; Triton compiles each when it is first launched."""
    from meshwright.compress import triton_parts

    stops = [node for one in program.encoding for node in one.reductions if node.op != "agreed"]
    shape = Shape(program, tile, {id(node): place for place, node in enumerate(stops)})
    text = source(shape)
    name = f"<kernels {next(_NAMES)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # where Triton looks for the text
    names: dict[str, Any] = {**vars(triton_parts), "__name__": "meshwright.compress.generated"}
    exec(compile(text, name, "exec"), names)
    return shape, names
