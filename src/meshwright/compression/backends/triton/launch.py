"""Launch the kernels of a batch: one after the other, each as early as it can begin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from meshwright.compression.backends.triton.threshold_search import CHUNK, GUESS, MARGIN
from meshwright.compression.language import Node
from meshwright.compression.program import ROUNDS, capacity, sampling

if TYPE_CHECKING:
    from meshwright.compression.backends.triton.batch import TritonBatch

# Register limits of kernels whose rare paths would take more, and leave room for fewer programs.
CHOOSING, COLLECTING, REDUCING = 48, 64, 64


class Run:
    """One encoding: the arguments of its kernels."""

    def __init__(self, batch: TritonBatch, flat: Tensor, message: Tensor, residual: Tensor | None, seed: int) -> None:
        self.batch, self.flat, self.message, self.residual = batch, flat, message, residual
        mixed = seed * 0x85EBCA77 & 0xFFFFFFFF
        self.seed = mixed - (1 << 32) if mixed >= 1 << 31 else mixed
        self.kept = flat if residual is None else residual
        # True if messages have flags of bad numbers; if these are still clear; if nothing has been launched.
        self.flagged, self.cleared, self.first = False, False, True
        self.few: dict[str, Any] = {"maxnreg": CHOOSING} if residual is None else {}

    def over(
        self, name: str, *, flag: bool = False, tiles: Tensor | None = None, warps: int = 0, **options: Any
    ) -> None:
        """Launch a kernel over all tiles."""
        its = self.batch
        tiles, warps = its._tiles if tiles is None else tiles, warps or its._warps
        self.launch(
            name, len(tiles), self.flat, self.kept, self.message, its.agreed, tiles, its._segments, its._partial,
            its._stats, its._found, its._sums, its._words, its._lists, its._values, self.seed, its._partial.shape[1], flag,
            self.residual is not None, warps=warps, last=(32 * warps, its._aligned), **options,
        )  # fmt: skip

    def launch(
        self, name: str, programs: int, *given: Any, warps: int, last: tuple[Any, ...] = (), **options: Any
    ) -> None:
        """Launch a kernel that waits for the previous one inside, so that it can begin earlier."""
        if not programs:
            return
        chain = 0 if not self.batch._overlaps else 1 if self.first else 2
        self.first = False
        if chain == 2:
            options["launch_pdl"] = True
        self.batch._kernels[name][(programs,)](*given, chain, *last, num_warps=warps, **options)


@dataclass(frozen=True)
class Search:
    """Search of one threshold, shared by programs; over all numbers it starts with a guess from a sample."""

    slot: int
    guess: Shared
    exact: Shared | None

    @classmethod
    def of(cls, batch: TritonBatch, node: Node) -> Search:
        slot = batch._shape.stats[id(node)]
        if node.every > 1:
            return cls(slot, Shared.of(batch, node.every, node.value), None)
        return cls(slot, Shared.of(batch, GUESS, min(1.0, node.value * MARGIN)), Shared.of(batch, 1, node.value))

    def launch(self, batch: TritonBatch, run: Run) -> None:
        clearing = (not run.cleared, batch._listed, run.flagged)
        self.guess.launch(f"search_{self.slot}", run, run.message, batch._sums, *clearing)
        run.cleared = True
        if self.exact is not None:
            run.over(f"pass_{self.slot}", **run.few)
            self.exact.launch(f"refine_{self.slot}", run, batch._found, batch._values, warps=16)


@dataclass(frozen=True)
class Shared:
    """Programs that examine a gradient, or a sample of it, together."""

    table: Tensor  # facts of every program
    board: Tensor  # their messages to each other, in every round
    share: int  # maximum programs of one gradient

    @classmethod
    def of(cls, batch: TritonBatch, every: int, part: float) -> Shared:
        steps, seen = np.array([sampling(one, every) for one in batch.counts], np.int64).reshape(-1, 2).T
        rows = np.clip(-(-seen // CHUNK), 1, batch._together)  # one for an empty gradient, too: it clears the message
        which = np.repeat(np.arange(len(rows)), rows)
        first = (np.cumsum(rows) - rows)[which]
        reach = np.array([capacity(int(one), part) for one in seen], np.int64)
        table = batch._table(
            which, np.arange(len(which)), first, rows[which], reach[which], steps[which], seen[which],
            np.array(batch.starts[:-1], np.int64)[which],
        )  # fmt: skip
        most = int(rows.max(initial=1))
        board = torch.zeros(ROUNDS + 2, max(len(which), 1), 16, dtype=torch.int64, device=batch.device)
        return cls(table, board, 1 if most == 1 else max(32, 1 << (most - 1).bit_length()))

    def launch(self, name: str, run: Run, *more: Any, warps: int = 8) -> None:
        its = run.batch
        run.launch(
            name, len(self.table), run.flat, run.kept, its.agreed, its._segments, its._stats, self.table, self.board,
            run.seed, self.board.shape[1], *more, run.residual is not None, self.share, its._aligned, warps=warps,
            enable_fp_fusion=False,
        )  # fmt: skip
