"""Plans for clusters of several kinds of devices.

- `cluster`: one plan for every kind of device
- `pipeline`: one pipeline across kinds of devices
"""
