"""Hooks in bytecode, for Python 3.11.

- `assemble`: bytecode of Python 3.11 with calls put in between
- `rewrite`: Python 3.11: the watched functions themselves get calls to our hooks
- `torch_compile`: `torch.compile` beside a watch of Python 3.11: it cannot compile calls of hooks
"""
