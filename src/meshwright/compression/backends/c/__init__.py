"""Codecs as C, compiled when they are first used.

- `batch`: codecs in C: what gradients are to compiled code
- `decoder`: the C function that decodes one gradient
- `encoder`: the C function that encodes one gradient, pass after pass
- `writer`: how values of a program are written in C: names, formulas, loops over a tile
"""
