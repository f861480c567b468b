"""Columns of a trace cached beside it as Parquet.

- `arrow`: convert a trace's columns to Arrow tables and back
- `arrow_memory`: Arrow with the system's allocator
- `cache`: the Parquet cache beside a trace
"""
