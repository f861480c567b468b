"""Batches on CUDA devices: one launch for each pass, however many gradients there are.

Each gradient is cut into tiles. A table on the device, made once, tells each program the gradient and position of its
tile. Nothing waits for the device, and all scratch memory is allocated with the batch, so encoding and decoding can be
captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.compression.backends.triton.decoder import SPREAD, in_order
from meshwright.compression.backends.triton.launch import COLLECTING, REDUCING, Run, Search
from meshwright.compression.backends.triton.source import source, sums
from meshwright.compression.backends.triton.text import functions
from meshwright.compression.backends.triton.values import LARGER, Shape
from meshwright.compression.batch import Batch
from meshwright.compression.language import Node
from meshwright.compression.program import Program, barriers, capacity, walk

TILE, WARPS = 2048, 4  # numbers and warps per program
CHOOSING = 4096  # numbers per program, if some are chosen


class TritonBatch(Batch):
    """Batch of gradients that are encoded and decoded by generated kernels."""

    def __init__(
        self, program: Program, counts: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32,
        *, tile: int = 0, warps: int = WARPS,
    ) -> None:  # fmt: skip
        super().__init__(program, counts, device, dtype)
        usual = TILE if program.encoding[-1].choice is None else CHOOSING
        self._tile, self._warps = max(tile or usual, program.block), warps
        self._shape, self._kernels = kernels(program, self._tile)
        self._last = program.encoding[-1]
        self._room = [capacity(one, self._part) if self._part else 0 for one in self.counts]
        lengths = np.array(self.counts, np.int64)
        # If numbers are chosen, a gradient's last tile writes their count: an empty gradient has a tile, too.
        self._tiles, first, many = self._tiling(lengths, self._tile, least=int(self._part > 0))
        self._groups, groups = self._grouped(first, many)
        self._large, *large = self._tiling(lengths, LARGER * self._tile)
        self._segments = self._table(
            np.array(self.starts[:-1]), lengths, np.array(self.places[:-1]), first, many, np.array(self._room), groups,
            *large,
            *(np.array(column) for column in self._fields()),
        )  # fmt: skip
        self._chosen = self._tiling(np.array(self._room, np.int64), self._tile, inside=True)[0]
        self._in_order = in_order(program)
        self._decoded = self._tiling(lengths, SPREAD)[0] if self._in_order else self._tiles
        # Programs that search a threshold together must run concurrently; the interpreter runs one after the other.
        cuda = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        self._together = min(128, cuda.multi_processor_count) if cuda else 1
        self._searches = {id(node): Search.of(self, node) for node in self._shape_nodes() if node.op == "threshold"}
        # Overlapping launches need a device on which a program can wait for the previous launch.
        self._overlaps = cuda is not None and cuda.major >= 9
        # One program combines the results of a gradient's tiles: in the same launch if they are few, else a wide one.
        few = max(large[1], default=0) <= 1024
        self._wide, self._joining = (1024, 4) if few else (8192, 16)
        self._scratch(len(self._tiles), len(self._shape.stats))
        aligned = int(np.gcd.reduce(np.array([16, *self.starts[:-1]])))
        self._aligned = aligned & -aligned

    @property
    def _listed(self) -> int:
        """Tiles of a group if numbers are chosen by a test, else 0."""
        choice = self._last.choice
        return 0 if choice is None or choice.op == "drawn" else self._shape.listed

    @property
    def _part(self) -> float:
        return max((one.part for one in self.program.fields if one.over == "chosen"), default=0.0)

    def _fields(self) -> list[list[int]]:
        """Return the offset of each field of each gradient in the message."""
        layouts = [self.program.layout(one) for one in self.counts]
        pairs = list(zip(self.places, layouts, strict=False))
        return [[place + layout[one.name] for place, layout in pairs] for one in self.program.fields]

    def _shape_nodes(self) -> list[Node]:
        return [node for one in self.program.encoding for node in one.reductions]

    def _table(self, *columns: Any) -> Tensor:
        return torch.from_numpy(np.stack(columns, axis=1).astype(np.int64)).to(self.device)

    def _tiling(self, lengths: Any, size: int, *, inside: bool = False, least: int = 0) -> tuple[Tensor, Any, Any]:
        """Return tiles, and each gradient's first tile and number of tiles.

        A tile is its offset in the buffer (with `inside`, that of its gradient), gradient, offset in it, and length.
        """
        many = np.maximum(-(-lengths // size), least)
        first = np.cumsum(many) - many
        which = np.repeat(np.arange(len(lengths)), many)
        start = (np.arange(many.sum()) - first[which]) * size
        at = np.array(self.starts[:-1], np.int64)[which] + (0 if inside else start)
        return self._table(at, which, start, np.minimum(lengths[which] - start, size)), first, many

    def _grouped(self, first: Any, many: Any) -> tuple[Tensor, Any]:
        """Return groups of a gradient's tiles (first, count, gradient, its first group), and each one's first group."""
        size = self._shape.listed
        groups = -(-many // size)
        which = np.repeat(np.arange(len(groups)), groups)
        start = np.cumsum(groups) - groups
        inside = (np.arange(len(which)) - start[which]) * size
        table = self._table(first[which] + inside, np.minimum(many[which] - inside, size), which, start[which])
        return table, start

    def _scratch(self, tiles: int, stats: int) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        gradients = len(self.counts)
        self._partial, self._stats = empty(stats + 1, max(tiles, 1)), empty(gradients, max(stats, 1))
        chosen = max(tiles, 1) if self._part or self._searches else 1
        self._found = empty(chosen, dtype=torch.int32)  # numbers chosen by every tile, and lists of them
        self._words = empty(chosen * self._tile // 32, dtype=torch.int32)
        self._lists = empty(chosen * self._shape.slots, dtype=torch.int64)  # indices and numbers
        self._values = empty(chosen * self._shape.slots if self._searches else 1)
        self._sums = empty(max(len(self._groups), 1), dtype=torch.int32)  # counts of every group of tiles

    def measure(self, flat: Tensor, *, residual: Tensor | None = None) -> None:
        if self.program.agrees is not None:
            run = Run(self, flat, self._found, residual, 0)
            self._before([self.program.agrees.args[0]], run, flag=False)
            self._agree(run)

    def encode(
        self, flat: Tensor, message: Tensor, *, residual: Tensor | None = None, seed: int = 0, agreed: bool = False
    ) -> None:
        self.check(message, flat, residual)
        if not self.counts:
            return
        run = Run(self, flat, message, residual, seed)
        agrees = self.program.agrees
        if agrees is not None and not agreed:
            self._before([agrees.args[0]], run, flag=True)
            self._agree(run)
        self._before([one.node for one in self._last.fields], run, flag=True)
        self._write(run)

    def _agree(self, run: Run) -> None:
        run.launch("agree", len(self.counts), self.agreed, self._segments, self._stats, warps=1)

    def _before(self, wanted: list[Node], run: Run, *, flag: bool) -> None:
        """Compute statistics that some values need, except those already agreed on."""
        needed = {id(node) for node in barriers(known(wanted))}
        for one in self.program.encoding[:-1]:
            if any(id(node) in needed for node in sums(one)):
                flags = flag and not run.flagged
                run.over(f"reduce_{one.level}", flag=flags, tiles=self._large, warps=2 * self._warps, maxnreg=REDUCING)
                run.launch(
                    f"finish_{one.level}", len(self.counts), run.message, self._segments, self._partial, self._stats,
                    self._partial.shape[1], flags, self._wide, warps=self._joining,
                )  # fmt: skip
                run.flagged |= flags
            for node in one.reductions:
                if node.op == "threshold" and id(node) in needed:
                    self._searches[id(node)].launch(self, run)

    def _write(self, run: Run) -> None:
        if not (run.cleared or (run.flagged and not self._listed)):
            run.launch(
                "heads", len(self.counts), run.message, self._segments, self._sums, self._shape.width, self._listed,
                run.flagged, warps=1,
            )  # fmt: skip
        flag = not run.flagged
        if self._last.choice is None:
            run.over("write_message", flag=flag)
            return
        run.over("choose", flag=flag, **run.few)
        if self._listed:
            run.launch(
                "collect", len(self._groups), run.flat, run.kept, run.message, self.agreed, self._tiles, self._segments,
                self._groups, self._stats, self._found, self._sums, self._words, self._lists, run.seed,
                run.residual is not None, warps=self._warps, last=(self._aligned,), maxnreg=COLLECTING,
            )  # fmt: skip

    def decode(self, message: Tensor, out: Tensor, *, add: bool = False) -> None:
        self.check(message, out, out=True)
        passed = (message, out, self.agreed)
        if self._part and (add or not self._in_order):
            if not add:
                out.zero_()
            self._kernel("scatter", self._chosen, *passed, self._chosen, self._segments, add, self._aligned)
        elif self._part:
            self._kernel("decode", self._decoded, *passed, self._decoded, self._segments, self._aligned)
        else:
            self._kernel("decode", self._tiles, *passed, self._tiles, self._segments, add, self._aligned)

    def _kernel(self, name: str, tiles: Tensor, *given: Any) -> None:
        if len(tiles):
            self._kernels[name][(len(tiles),)](*given, num_warps=self._warps)


def known(nodes: list[Node]) -> list[Node]:
    """Return values that must be computed for others: those below an agreed one are not needed."""
    found: list[Node] = []
    for node in nodes:
        if node.op != "agreed":
            below = known(list(node.args))
            found += below if any(arg.op == "agreed" for arg in walk(node)) else [node]
    return found


@cache
def kernels(program: Program, tile: int) -> tuple[Shape, dict[str, Any]]:
    """Return the kernels of a program by name; Triton compiles each at its first launch."""
    stops = [node for one in program.encoding for node in one.reductions if node.op != "agreed"]
    shape = Shape(program, tile, {id(node): place for place, node in enumerate(stops)})
    return shape, functions(source(shape))
