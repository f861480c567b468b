"""Cost of operators, and the work that their shapes imply.

- `bytes_moved`: bytes that operators with little computation must move
- `flops`: FLOPs and bytes of an operator, from recorded shapes and types
- `inputs`: inputs of an operator as the profiler recorded them, and their cost
- `operators`: time of operators on the host and the device
- `roofline`: best rates of a device
"""
