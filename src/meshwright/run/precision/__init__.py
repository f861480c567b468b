"""Matrix products in 8, 16 or 32 bits, and the loss scale.

- `loss_scale`: loss scaling for float16 (Micikevicius et al., 2018)
- `matmul`: a matrix product computed in a chosen type
- `rounding`: the rounding error of a product in a coarser type
"""
