"""Gradients of many kinds, and the batches that encode them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meshwright.compression import Codec, codec, codecs
from meshwright.compression.backends.c.batch import NativeBatch
from meshwright.compression.backends.numpy.batch import PortableBatch
from meshwright.compression.batch import Batch

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS = ["normal", "heavy", "zeros", "same", "sparse", "tiny", "ties"]
# Every size modulo every pack width, and around blocks, runs, words and tiles.
SIZES = [*range(71), *(m + d for m in (128, 256, 512, 1024, 2048) for d in (-1, 0, 1, 3))]
NAMES = sorted(name for name, one in codecs().items() if one.rounds == 1)
SPARSE = ["dgc", "graddrop", "randomk", "topk"]
OTHERS = [
    codec("terngrad", bits=1),
    codec("terngrad", bits=4),
    codec("terngrad", bits=8),
    codec("int8", block=32),
    codec("int4", block=2048),
    codec("homomorphic", bits=16, members=7),
    codec("topk", part=0.3),
    codec("tbq", times=0.5),
]
ALL = [codec(name) for name in NAMES] + OTHERS

# Options do not change how numbers are loaded: halves are tried with the usual ones.
TYPED = [(one, torch.float32) for one in ALL] + [(codec(name), dtype) for name in NAMES for dtype in DTYPES[1:]]


def called(one: Codec) -> str:
    usual = codec(one.name).options
    return one.name + "".join(f"-{value}" for key, value in one.options.items() if usual[key] != value)


def numbers(kind: str, count: int, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=count)
    made = {
        "normal": normal * 1e-3,
        "heavy": np.sign(normal) * np.abs(normal) ** 5,
        "zeros": normal * 0,
        "same": np.full(count, -0.5),
        "sparse": normal * (rng.random(count) < 0.1),
        "tiny": normal * 1e-41,
        "ties": np.round(normal),
    }[kind]
    return torch.from_numpy(made.astype(np.float32))


def sent(batch: Batch, flat: Tensor, residual: Tensor | None = None, seed: int = 0) -> Tensor:
    """The message, written over what was there before."""
    message = batch.new_message().fill_(0xA5)
    batch.encode(flat, message, residual=residual, seed=seed)
    return message


def received(batch: Batch, message: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((sum(batch.counts),), 7.0, dtype=dtype)
    batch.decode(message, out)
    return out


def both(one: Codec, counts: list[int], dtype: torch.dtype = torch.float32) -> tuple[Batch, Batch]:
    return NativeBatch(one.program, counts, CPU, dtype), PortableBatch(one.program, counts, CPU, dtype)
