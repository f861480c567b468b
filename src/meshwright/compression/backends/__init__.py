"""Backends that compile a codec to C, NumPy or Triton.

- `c`: codecs as C, compiled when they are first used
- `numpy`: codecs in NumPy
- `triton`: codecs as Triton kernels, generated as text
"""
