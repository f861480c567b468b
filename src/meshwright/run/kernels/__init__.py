"""Fused kernels with hand-written gradients: Triton on CUDA devices, plain PyTorch elsewhere."""

from meshwright.run.kernels.gated import gated
from meshwright.run.kernels.norm import rms_norm, rms_norm_beside
from meshwright.run.kernels.rotary import split_turned, turned

__all__ = ["gated", "rms_norm", "rms_norm_beside", "split_turned", "turned"]
