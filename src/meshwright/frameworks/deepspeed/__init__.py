"""DeepSpeed, import and export.

- `read`: DeepSpeed's `ds_config.json` as a plan
- `write`: a plan as `ds_config.json`
"""
