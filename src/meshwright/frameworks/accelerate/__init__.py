"""Hugging Face Accelerate, both ways.

- `read`: accelerate's configuration, YAML of two levels or JSON, as a plan
- `write`: Hugging Face Accelerate
"""
