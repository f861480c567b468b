"""Verbs to and from other frameworks.

- `export`: meshwright export PLAN --to FORMAT
- `import_`: meshwright import FILE --from FORMAT --cluster CLUSTER
"""
