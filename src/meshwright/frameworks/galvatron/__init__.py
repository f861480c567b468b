"""Hetu-Galvatron, both ways.

- `read`: hetu-Galvatron's strategy file as a plan
- `write`: hetu-Galvatron
"""
