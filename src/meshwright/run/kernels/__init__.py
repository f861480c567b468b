"""Fused kernels with hand-written gradients: Triton on CUDA devices, plain PyTorch elsewhere."""

from meshwright.run.kernels.fused import gated, rms_norm, rms_norm_beside, split_turned, turned

__all__ = ["gated", "rms_norm", "rms_norm_beside", "split_turned", "turned"]
