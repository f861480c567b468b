"""Columns kept as Parquet beside a trace.

- `arrow`: a trace's columns as Arrow tables, and back
- `arrow_memory`: arrow with the system's allocator
- `cache`: a trace's columns kept beside it, in Parquet
"""
