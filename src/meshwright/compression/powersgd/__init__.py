"""PowerSGD (Vogels et al., 2019): gradients as products of thin matrices.

- `low_rank`: PowerSGD for a buffer of gradients
- `cuda`: PowerSGD on a CUDA device
- `passes`: the three passes of PowerSGD over one matrix
- `rounds`: PowerSGD's rounds, one matrix after the other
- `triton_kernels`: PowerSGD's passes over all matrices of a buffer as Triton text
- `triton_uncompressed`: gradients that are sent uncompressed, and detection of bad numbers
"""
