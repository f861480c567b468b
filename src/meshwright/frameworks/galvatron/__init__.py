"""Hetu-Galvatron, import and export.

- `read`: Hetu-Galvatron's strategy file as a plan
- `write`: a plan as a strategy file
"""
