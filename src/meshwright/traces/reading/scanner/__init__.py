"""Scanners from JSON text to columns: in C, or in NumPy without a compiler.

- `careful`: scan events one by one, as scanner.c does
- `compiled`: scanner.c and the files below it, built on first use
- `portable`: scan without a compiler
- `splitting`: find the ends of a JSON list's items with NumPy
"""
