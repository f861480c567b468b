"""Benefit of compression: for sizes and links, and for the gradients of a plan.

- `grid`: decisions by size and bandwidth
- `page`: decisions as words of a table, and as a self-contained page
- `plan_gradients`: gradients that the replicas of a plan sum, layer by layer
- `planned`: layers of a plan that would send compressed gradients
- `scaled_costs`: costs of gradients of any size
"""
