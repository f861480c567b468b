"""PowerSGD on a CUDA device: each pass is one launch for all gradients, and nothing waits for the device.

Tables with the gradient and position of each program are made once, as is all scratch memory, so that a step can be
captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import gcd
from typing import Any

import torch
from torch import Tensor

from meshwright.compression.backends.triton.text import functions
from meshwright.compression.powersgd.triton_kernels import CHUNK, LANES, MOST, SPREAD, WIDE, Thin, source

PLAIN = 2048  # numbers per program, of gradients that are sent uncompressed


class DeviceRounds:
    """Rounds of gradients as matrices, with the rank of each; 0 for those sent uncompressed."""

    asks_host = False

    def __init__(self, shapes: Sequence[tuple[int, int]], ranks: Sequence[int], start: Tensor) -> None:
        from meshwright.compression.powersgd import triton_uncompressed

        self._start, self._device = start.clone(), start.device
        self.thin = Thin(1 << (max(ranks) - 1).bit_length())
        self._text, self._parts = kernels(self.thin), triton_uncompressed
        self._lay(list(zip(shapes, ranks, strict=True)))
        cuda = torch.cuda.get_device_properties(self._device) if self._device.type == "cuda" else None
        self._overlaps = cuda is not None and torch.version.hip is None and cuda.major >= 9
        self._chain = 0

    def _lay(self, gradients: list[tuple[tuple[int, int], int]]) -> None:
        """Lay out tables of matrices and tiles, and memory for sums of the second product."""
        at = first = second = counters = sums = 0
        matrices, judged, plain = list[list[int]](), list[list[int]](), list[tuple[int, int, int]]()
        tiles = [list[list[int]]() for _ in range(3)]
        for (rows, columns), rank in gradients:
            if rank:
                chunks, blocks, matrix = -(-rows // CHUNK), -(-columns // LANES), len(matrices)
                matrices.append([at, rows, columns, first, second, rank, counters, sums, chunks])
                judged.append([1, second, rank * columns])
                tiles[0] += [[matrix, top] for top in range(0, rows, self.thin.rows)]
                tiles[1] += [[matrix, chunk, block] for chunk in range(chunks) for block in range(blocks)]
                tiles[2] += [[matrix, i, k] for i in range(-(-rows // SPREAD)) for k in range(-(-columns // WIDE))]
                counters, sums = counters + blocks, sums + chunks * self.thin.rank * columns
            else:
                plain.append((at, first, rows * columns))
            at, first, second = at + rows * columns, first + rows * (rank or columns), second + rank * columns
        sent = [
            [len(matrices) + i, begin + k, to + k, min(PLAIN, many - k)]
            for i, (begin, to, many) in enumerate(plain)
            for k in range(0, many, PLAIN)
        ]
        judged += [[0, to, many] for _, to, many in plain]
        self._matrices, self._judged, self._sent = map(self._table, (matrices, judged, sent))
        self._first, self._second, self._spread = map(self._table, tiles)
        self._flags = torch.zeros(len(judged), dtype=torch.int32, device=self._device)
        self._counters = torch.zeros(counters, dtype=torch.int32, device=self._device)
        self._partial = torch.empty(sums, device=self._device)
        self._aligned = gcd(16, *(value for one in matrices for value in (one[0], one[2], one[4])))
        self._tall = gcd(16, *(value for one in matrices for value in (one[1], one[3])))

    def _table(self, rows: list[list[int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int64, device=self._device)

    def first(self, flat: Tensor, residual: Tensor | None, q: Tensor, p: Tensor) -> None:
        """Run `Passes.first` for all gradients; uncompressed ones are copied to p, too."""
        self._chain = 0
        kept, kept_is = flat if residual is None else residual, residual is not None
        if len(self._sent):
            self._launch(self._parts.send, len(self._sent), flat, kept, p, self._sent, PLAIN, kept_is)
        self._launch(
            self._text["first"], len(self._first), flat, kept, p, q, self._matrices, self._first, kept_is,
            last=(self._aligned,),
        )  # fmt: skip

    def second(self, flat: Tensor, residual: Tensor | None, p: Tensor, q: Tensor) -> None:
        """Orthogonalise P, and compute q as its product with the matrices; NaN if P has a NaN."""
        self._chain = 0
        self._launch(
            self._text["orthogonalise"], len(self._matrices), p, self._matrices, last=(self._tall,), warps=8
        )  # fmt: skip
        self._launch(
            self._text["second"], len(self._second), flat, p, q, self._partial, self._counters, self._matrices,
            self._second, last=(self._aligned,), warps=LANES // 128,
        )  # fmt: skip

    def finish(self, flat: Tensor, residual: Tensor | None, p: Tensor, q: Tensor, lacks: Tensor | None) -> None:
        """Finish as `LowRank.finish` does."""
        self._chain = 0
        kept, kept_is = flat if residual is None else residual, residual is not None
        self._launch(
            self._parts.judge, len(self._judged), p, q, self._start, self._flags, self._judged, 4096, warps=8
        )  # fmt: skip
        self._launch(
            self._text["spread"], len(self._spread), flat, kept, p, q, self._flags, self._matrices, self._spread, kept_is,
            last=(self._aligned,),
        )  # fmt: skip
        if len(self._sent):
            self._launch(
                self._parts.receive, len(self._sent), flat, kept, p, p if lacks is None else lacks, self._flags, self._sent,
                PLAIN, kept_is, lacks is not None,
            )  # fmt: skip

    def _launch(self, kernel: Any, programs: int, *given: Any, last: tuple[Any, ...] = (), warps: int = 4) -> None:
        """Launch a kernel that starts before the previous one has ended, if the device supports it."""
        options = {"launch_pdl": True} if self._chain else {}
        chain = 0 if not self._overlaps else 2 if self._chain else 1
        self._chain = int(self._overlaps)
        kernel[(programs,)](*given, chain, *last, num_warps=warps, **options)


def device_rounds(shapes: Sequence[tuple[int, int]], ranks: Sequence[int], start: Tensor) -> DeviceRounds | None:
    """Return device rounds, or None without a device, Triton, or enough registers for the ranks."""
    if start.device.type != "cuda" or not 0 < max(ranks, default=0) <= MOST:
        return None
    try:
        return DeviceRounds(shapes, ranks, start)
    except ImportError:
        return None


@cache
def kernels(thin: Thin) -> dict[str, Any]:
    """Return the kernels whose text depends on the rank, by name."""
    return functions(source(thin))
