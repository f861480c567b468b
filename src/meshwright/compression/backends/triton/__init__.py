"""Codecs as Triton kernels, generated as text.

- `batch`: batches on CUDA devices
- `compaction`: lists of the numbers that pass a test as Triton text, one for each tile, in the order of their places
- `decoder`: decoding as Triton text
- `kernel`: a kernel over tiles as Triton text
- `launch`: how kernels of a batch are launched
- `parts`: what the generated Triton kernels are made of
- `random_selection`: numbers that are chosen at random as Triton text
- `selection`: choosing numbers as Triton text
- `source`: Triton kernels as text, from a program
- `text`: from text to kernels
- `threshold_search`: searching a threshold as Triton text
- `values`: the values of a program as Triton expressions
- `waiting`: how programs of one launch, and launches that follow each other, wait for what others find
"""
