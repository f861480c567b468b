"""Descriptions of values, and comparison with their earlier state.

- `compiled`: the C code of the watch, built on first use with the headers of this Python
- `describe`: short descriptions that are equal in every process, so that ranks can be compared
- `marks`: the state of a value at the last look, small enough to look again after every line
- `snapshot`: the names of one object, call or module, with their values at the last look
- `thread`: state of one thread of the program
- `unchanged`: check that a dict, list or tensor has not changed
"""
