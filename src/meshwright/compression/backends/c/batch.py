"""Codecs in C: batches of gradients for compiled code."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from meshwright.base.native import loaded
from meshwright.compression.backends.c.decoder import Decoder
from meshwright.compression.backends.c.encoder import Encoder
from meshwright.compression.batch import Batch
from meshwright.compression.program import Program

# C from a program: one function that encodes a gradient, pass after pass, and one that decodes.


_ENTRIES = """
void encode(const NUMBER *flat, float *res, uint8_t *msg, const int64_t *table, int64_t many, uint32_t seed, float *agreed,
            int mode) {
    for (int64_t s = 0; s < many; s++) {
        const int64_t n = table[3 * s], start = table[3 * s + 1], place = table[3 * s + 2];
        if (res) encode_one(flat + start, res + start, msg + place, n, seed, agreed + s, mode, 1);
        else encode_one(flat + start, 0, msg + place, n, seed, agreed + s, mode, 0);
    }
}
void decode(const uint8_t *msg, NUMBER *out, const int64_t *table, int64_t many, const float *agreed, int add) {
    for (int64_t s = 0; s < many; s++) {
        const int64_t n = table[3 * s], start = table[3 * s + 1], place = table[3 * s + 2];
        if (add) decode_one(msg + place, out + start, n, agreed + s, 1);
        else decode_one(msg + place, out + start, n, agreed + s, 0);
    }
}
"""


def c_source(program: Program, number: str) -> str:
    """Return the whole C file; `number` is the type of gradients: f32, f16 or bf16."""
    head = [
        f"#define NUMBER {'float' if number == 'f32' else 'uint16_t'}",
        f"#define FROM(x) from_{number}(x)",
        f"#define TO(x) to_{number}(x)",
        files("meshwright.compression.backends.c").joinpath("native.h").read_text(),
    ]
    return "\n".join([*head, Encoder(program).text(), Decoder(program).text(), _ENTRIES]) + "\n"


NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
ALL, MEASURE, REST = 0, 1, 2  # as in native.h


class NativeBatch(Batch):
    """Batch of gradients that one call to C encodes."""

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
    """Return the compiled program for gradients of a type (f32, f16, bf16)."""
    made = loaded(c_source(program, number))
    pointer, many, whole = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    made.encode.argtypes = [pointer, pointer, pointer, pointer, many, ctypes.c_uint32, pointer, whole]
    made.decode.argtypes = [pointer, pointer, pointer, many, pointer, whole]
    made.encode.restype = made.decode.restype = None
    return made
