"""Hooks of watched calls, and the points at which they look at names.

- `follow`: followed names beside calls (attributes, locals, globals), and reports of their changes
- `full`: hooks that also look at attributes, locals, globals and wrappers
- `hooks`: hooks that a watched function calls
- `objects`: followed names, and the last seen values of every watched object
- `points`: points in a code object at which to look
- `site`: fixed facts of one watched code object
- `steps`: steps of a watched call
"""
