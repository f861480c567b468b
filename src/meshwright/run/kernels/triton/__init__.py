"""Kernels in Triton; imported where there is a CUDA device only."""
