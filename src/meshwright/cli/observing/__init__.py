"""Verbs that read what happened: traces and watched programs.

- `analyze`: meshwright analyze
- `watch`: meshwright watch
"""
