"""Codecs in NumPy: the reference, and the fallback without a compiler.

- `batch`: batches without a compiler
- `reference`: reference implementation of algorithms
"""
