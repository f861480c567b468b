"""Verbs that show facts: models, clusters, this machine, the schema.

- `cluster`: meshwright cluster detect
- `clusters`: meshwright clusters [NAME]
- `models`: meshwright models [NAME]
- `schema`: meshwright schema
"""
