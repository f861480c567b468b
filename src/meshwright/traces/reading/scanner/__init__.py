"""JSON text to columns: in C, or in NumPy without a compiler.

- `careful`: events one by one, as scanner.c takes them
- `compiled`: scanning with scanner.c and the files below it, built on first use
- `portable`: scanning without a compiler
- `splitting`: where the items of a JSON list end, found with NumPy
"""
