"""Codecs as C, compiled when they are first used.

- `batch`: batches of gradients for compiled code
- `decoder`: the C function that decodes one gradient
- `encoder`: the C function that encodes one gradient, pass after pass
- `writer`: values of a program in C: names, formulas, loops over a tile
"""
