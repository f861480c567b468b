"""What operators cost, beside what their shapes ask for.

- `bytes_moved`: what operators that compute little have to move
- `flops`: what an operator has to compute and to move, from the shapes and types that the profiler wrote down
- `inputs`: what an operator was called with, as the profiler wrote it down, and what that costs
- `operators`: what operators cost
- `roofline`: what a device could do at best
"""
