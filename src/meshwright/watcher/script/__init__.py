"""A program run as Python would run it, watched from its first line.

- `program`: a program as Python would find it
- `script`: a script or module run as Python would run it, watched from its first line until its last thread has ended
"""
