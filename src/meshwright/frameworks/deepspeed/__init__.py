"""DeepSpeed, both ways.

- `read`: deepSpeed's `ds_config.json` as a plan
- `write`: DeepSpeed
"""
