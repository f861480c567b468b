"""Recognise kernels that move data between devices, by their names."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.reading import Category, Trace

# Libraries; hand-written collectives (custom and symmetric-memory all-reduces of vLLM, SGLang, TensorRT-LLM,
# FlashInfer, PyTorch); dispatch and combine of experts (DeepEP, MORI). Fused kernels of TorchInductor carry the names
# of their neighbours, and reductions inside one block or warp are called "all reduce" too: both are compute.
COMMUNICATION = re.compile(
    r"^(?!triton_[a-z]+_fused)(?:.*?)(?:"
    r"nccl|rccl|hccl|hcom_|mccl|oneccl|msccl|nvshmem|rocshmem|userbuffers|symm_mem|multimem"
    r"|(?<!sm)(?<!warp)(?<!block)(?<!warp_)(?<!block_)all_?reduce|(?<!sm)all_?gather|reduce_?scatter|all_?to_?all|all2all"
    r"|cross_device_reduce|quick_?reduce|(?:one|two)_?shot_(?:all|reduce)"
    r"|deep_?ep|(?:inter|intra)node(?:_ll)?::|ep_?(?:dispatch|combine)(?:inter|intra)"
    r")",
    re.IGNORECASE | re.DOTALL,
)


def communicates(name: str) -> bool:
    """Return True if a kernel's name is that of communication.

    >>> communicates("ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), communicates("multimem_all_reduce_kernel<bf16, 4>")
    (True, True)
    >>> communicates("void at::native::reduce_kernel<512, 1>"), communicates("triton_poi_fused_all_gather_add_0")
    (False, False)
    >>> communicates("smallReduceKernel"), communicates("small_gather")
    (False, False)
    """
    return COMMUNICATION.search(name) is not None


def communication_kernels(trace: Trace, pattern: re.Pattern[str] = COMMUNICATION) -> NDArray[np.bool_]:
    """Return True for kernels that communicate: by name, or because they record their collective."""
    kernels = np.flatnonzero(trace.events.category == Category.KERNEL)
    names = trace.events.name[kernels]
    named = np.zeros(len(trace.texts), np.bool_)
    for number in np.flatnonzero(np.bincount(names)):
        named[number] = _matches(pattern, trace.texts[number])
    told = np.zeros(len(trace.events), np.bool_)
    told[trace.collectives.row[trace.collectives.name > 0]] = True
    found = np.zeros(len(trace.events), np.bool_)
    found[kernels] = named[names] | told[kernels]
    return found


@lru_cache(1 << 14)
def _matches(pattern: re.Pattern[str], name: str) -> bool:
    """Match a name, with a cache: names are long, and the same on all ranks."""
    return pattern.search(name) is not None
