"""Clusters of several kinds of devices.

- `cluster`: clusters of different devices
- `pipeline`: one pipeline across kinds of devices
"""
