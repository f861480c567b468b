"""Hugging Face Accelerate, import and export.

- `read`: Accelerate's configuration (YAML of two levels or JSON) as a plan
- `write`: a plan as Accelerate's configuration
"""
