"""Bytes of a plan on each device.

- `device_memory`: bytes per device of any plan
- `transient`: bytes that live only while something runs
"""
