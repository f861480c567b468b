"""Classify kernels that compute by their names, to tell slow products from slow pointwise work."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from meshwright.traces.distinct import distinct
from meshwright.traces.reading import Trace

# The first match counts. Libraries: cuBLAS, cuBLASLt, CUTLASS, Tensile, hipBLASLt, cuDNN, MIOpen, FlashAttention,
# Triton as TorchInductor names it, PyTorch's own kernels, CANN.
PATTERNS = {
    "attention": r"scaled_dot_product|flash|fmha|attention|sdpa|_attn|paged",
    "convolution": r"conv|winograd|implicit_gemm|im2col|dgrad|wgrad|fprop",
    "product": r"gemm|aten::(?:add|b|badd)?mm$|cutlass|cublas|Cijk_|xmma|matmul|(?:^|_)mm_|nvjet|wgmma|gemv|dot_kernel",
    "optimizer": r"adam|adagrad|multi_tensor_apply|lamb(?!da)|sgd_|foreach",
    "normalisation": r"layer_?norm|rms_?norm|batch_?norm|bn_fw|bn_bw|group_?norm|norm",
    "softmax and loss": r"softmax|cross_?entropy|nll_loss|logsumexp",
    "indexing": r"embedding|index|gather|scatter|sort|radix|topk|unique|histogram|bounds_check|_lookup",
    "reduction": r"reduce|triton_red|triton_per|welford|cumsum|scan",
    "copy": r"copy|cat_?array|transpose|permute|fill|memset|memcpy|triton_poi_fused_clone|_to_copy",
    "pointwise": r"elementwise|pointwise|triton_poi|vectorized|dropout|gelu|relu|silu|swiglu|unrolled",
}
CLASSES = (*PATTERNS, "other")
_COMPILED = {label: re.compile(pattern, re.IGNORECASE) for label, pattern in PATTERNS.items()}


@lru_cache(1 << 14)  # names are long, and the same on all ranks
def kernel_class(name: str) -> str:
    """Return the class of a kernel.

    >>> kernel_class("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn"), kernel_class("triton_poi_fused_add_0")
    ('product', 'pointwise')
    >>> kernel_class("void at::native::reduce_kernel<512, 1>"), kernel_class("my_kernel")
    ('reduction', 'other')
    """
    for label, pattern in _COMPILED.items():
        if pattern.search(name):
            return label
    return CLASSES[-1]


def classes_of(trace: Trace, names: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the index into CLASSES of each name (numbers into the trace's texts)."""
    place = np.full(len(trace.texts), -1, np.int64)
    for number in distinct(names):
        place[number] = CLASSES.index(kernel_class(trace.texts[number]))
    return place[names]
