"""Codecs in C: what gradients are to compiled code."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.base.native import loaded
from meshwright.compress.batch import Batch
from meshwright.compress.c_source import c_source
from meshwright.compress.program import Program

NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
ALL, MEASURE, REST = 0, 1, 2  # as in native.h


class NativeBatch(Batch):
    """Gradients that one call to C encodes."""

    def __init__(
        self, program: Program, counts: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(program, counts, device, dtype)
        rows = list(zip(self.counts, self.starts, self.places, strict=False))
        self._table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
        self._libraries = {dtype: library(program, NAMES[dtype])}

    def measure(self, flat: Tensor, *, residual: Tensor | None = None) -> None:
        self.check(None, flat, residual)
        if self.program.agrees is not None:
            self._encode(flat, None, residual, 0, MEASURE)

    def encode(
        self, flat: Tensor, message: Tensor, *, residual: Tensor | None = None, seed: int = 0, agreed: bool = False
    ) -> None:
        self.check(message, flat, residual)
        self._encode(flat, message, residual, seed, REST if agreed and self.program.agrees is not None else ALL)

    def _encode(self, flat: Tensor, message: Tensor | None, residual: Tensor | None, seed: int, mode: int) -> None:
        self._libraries[self.dtype].encode(
            address(flat),
            address(residual),
            address(message),
            address(self._table),
            len(self.counts),
            seed & 0xFFFFFFFF,
            address(self.agreed),
            mode,
        )

    def decode(self, message: Tensor, out: Tensor, *, add: bool = False) -> None:
        self.check(message, out, out=True)
        if out.dtype not in self._libraries:
            self._libraries[out.dtype] = library(self.program, NAMES[out.dtype])
        self._libraries[out.dtype].decode(
            address(message), address(out), address(self._table), len(self.counts), address(self.agreed), int(add)
        )


def address(tensor: Tensor | None) -> ctypes.c_void_p | None:
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


def library(program: Program, number: str) -> Any:
    """The compiled program for gradients of a type (f32, f16, bf16)."""
    made = loaded(c_source(program, number))
    pointer, many, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    made.encode.argtypes = [pointer, pointer, pointer, pointer, many, ctypes.c_uint32, pointer, whole]
    made.decode.argtypes = [pointer, pointer, pointer, many, pointer, whole]
    made.encode.restype = made.decode.restype = None
    return made
