"""PowerSGD (Vogels et al., 2019): gradients as products of thin matrices.

- `low_rank`: PowerSGD (Vogels et al
- `cuda`: PowerSGD on a CUDA device
- `passes`: the three passes of PowerSGD over one matrix
- `rounds`: powerSGD's rounds, one matrix after the other
- `triton_kernels`: powerSGD's passes over all matrices of a buffer as Triton text
- `triton_uncompressed`: what PowerSGD does with gradients that are sent as they are, and how it finds bad ones
"""
