"""Verbs that read traces and watched programs.

- `analyze`: meshwright analyze
- `watch`: meshwright watch
"""
