"""What is watched: modules, classes and functions by name.

- `decorated`: functions with a watched code that a call made before the watch began
- `imported_later`: targets in modules that the program has not imported yet
- `outline`: what the text of a program says that its code does not, before it has run
- `targets`: what is watched
"""
