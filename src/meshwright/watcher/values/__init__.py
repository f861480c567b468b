"""Values described, and compared with what they were.

- `compiled`: the C of the watch, built on first use with the headers of this Python
- `describe`: values in a few words that are the same in every process, so that ranks can be compared
- `marks`: what a value was when last looked at, small enough to look again after every line
- `snapshot`: the names of one object, call or module, and what they held when last looked at
- `thread`: what is kept of one thread of the program
- `unchanged`: whether a dict, list or tensor is still what it was
"""
