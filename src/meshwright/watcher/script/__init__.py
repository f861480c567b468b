"""Watching a script or module from its first line.

- `program`: a program as Python would find it
- `script`: run the program as Python would, and watch it until its last thread has ended
"""
