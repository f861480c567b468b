"""A codec as C, NumPy or Triton.

- `c`: codecs as C, compiled when they are first used
- `numpy`: codecs in NumPy
- `triton`: codecs as Triton kernels, generated as text
"""
