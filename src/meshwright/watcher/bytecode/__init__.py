"""Hooks in bytecode, for Python 3.11.

- `assemble`: insert calls into bytecode of Python 3.11
- `rewrite`: insert hooks into watched functions
- `torch_compile`: keep `torch.compile` away from watched functions, since it cannot compile hooks
"""
