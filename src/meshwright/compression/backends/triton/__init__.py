"""Codecs as Triton kernels, generated as text.

- `batch`: batches on CUDA devices
- `compaction`: lists of the numbers that pass a test, one list per tile, in order
- `decoder`: decoding
- `kernel`: a kernel over tiles
- `launch`: launches of a batch's kernels
- `parts`: building blocks of the generated kernels
- `random_selection`: random choice of numbers
- `selection`: choice of numbers by a test
- `source`: Triton kernels as text, from a program
- `text`: compile text to kernels
- `threshold_search`: search of a threshold
- `values`: the values of a program as Triton expressions
- `waiting`: synchronisation within a launch, and between successive launches
"""
