"""Watched modules, classes and functions by name.

- `decorated`: functions with watched code that were created before the watch began
- `imported_later`: targets in modules that the program has not imported yet
- `outline`: facts of a program's source that its code lacks before it has run
- `targets`: targets and the code objects that they stand for
"""
