"""Products in 8, 16 or 32 bits, and the loss scale.

- `loss_scale`: loss scaling for float16 (Micikevicius et al., 2018)
- `matmul`: a matrix product computed in a type of its own
- `rounding`: what a coarser type would do to the numbers of a product
"""
