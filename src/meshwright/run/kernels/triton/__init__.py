"""Kernels in Triton; imported only on a machine with a CUDA device."""
