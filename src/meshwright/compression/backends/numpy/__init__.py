"""Codecs in NumPy: the reference, and the fallback without a compiler.

- `batch`: a batch without a compiler
- `reference`: what an algorithm means, in NumPy
"""
