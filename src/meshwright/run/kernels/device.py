"""Check of where Triton runs."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

from torch import Tensor


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def fused(*tensors: Tensor) -> bool:
    """Return True if kernels are launched for these tensors: they are on CUDA, and Triton is installed.

    >>> import torch
    >>> fused(torch.zeros(1))
    False
    """
    return all(tensor.is_cuda for tensor in tensors) and _has_triton()
