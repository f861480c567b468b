"""What a watched call does: its hooks, and where it looks at names.

- `follow`: what is followed beside calls, attributes, locals and globals, and how a change of them is said
- `full`: hooks that also look at attributes, locals, globals and what a wrapper says
- `hooks`: what a watched function calls
- `objects`: which names are followed, and what every watched object held when last looked at
- `points`: where in a code object a look is due
- `site`: what is fixed about one watched code object
- `steps`: what a watched call does, step by step
"""
