"""What compression would bring: for sizes and links, and for the gradients of a plan.

- `grid`: what pays by size and bandwidth
- `page`: what pays, as words of a table and as a page of its own that needs nothing else
- `plan_gradients`: gradients that the replicas of a plan sum, layer by layer
- `planned`: which layers of a plan would send compressed gradients
- `scaled_costs`: costs of gradients of any size
"""
