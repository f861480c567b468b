"""Categories of events, over all versions of the format."""

from __future__ import annotations

from enum import IntEnum


class Category(IntEnum):
    """Categories of events; `Trace.categories` counts the words found in the file."""

    OTHER = 0
    OPERATOR = 1
    ANNOTATION = 2
    DEVICE_ANNOTATION = 3
    KERNEL = 4
    MEMCPY = 5
    MEMSET = 6
    RUNTIME = 7
    DRIVER = 8
    PYTHON = 9
    SYNC = 10  # a wait on a stream: no work
    OVERHEAD = 11
    LAUNCH_FLOW = 12
    BACKWARD_FLOW = 13
    INSTANT = 14
    SPAN = 15


# 2021 wrote capitalised words and `async`, 2022 `async_cpu_to_gpu`; the rest is written since 2023.
WORDS = {
    "cpu_op": Category.OPERATOR,
    "Operator": Category.OPERATOR,
    "user_annotation": Category.ANNOTATION,
    "gpu_user_annotation": Category.DEVICE_ANNOTATION,
    "kernel": Category.KERNEL,
    "Kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "Memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "Memset": Category.MEMSET,
    "cuda_runtime": Category.RUNTIME,
    "Runtime": Category.RUNTIME,
    "privateuse1_runtime": Category.RUNTIME,
    "mtia_runtime": Category.RUNTIME,
    "xpu_runtime": Category.RUNTIME,
    "cuda_driver": Category.DRIVER,
    "privateuse1_driver": Category.DRIVER,
    "xpu_driver": Category.DRIVER,
    "python_function": Category.PYTHON,
    "cuda_sync": Category.SYNC,
    "cuda_event": Category.SYNC,
    "overhead": Category.OVERHEAD,
    "ac2g": Category.LAUNCH_FLOW,
    "async": Category.LAUNCH_FLOW,
    "async_cpu_to_gpu": Category.LAUNCH_FLOW,
    "async_gpu": Category.LAUNCH_FLOW,
    "async_npu": Category.LAUNCH_FLOW,
    "HostToDevice": Category.LAUNCH_FLOW,
    "fwdbwd": Category.BACKWARD_FLOW,
    "forward_backward": Category.BACKWARD_FLOW,
    "cpu_instant_event": Category.INSTANT,
    "Trace": Category.SPAN,
}


def category(word: str) -> Category:
    """Return the category of a word.

    >>> category("gpu_memcpy") is category("Memcpy")
    True
    >>> category("").name
    'OTHER'
    """
    return WORDS.get(word, Category.OTHER)
