"""Slow ranks and links, and what they cost.

- `operation_records`: jobs that were recorded operation by operation, as the published straggler jobs are
- `slow_links`: links
- `slow_ranks`: which of several ranks that do the same are slower than the others, by how much, and since when
- `stragglers`: stragglers
- `what_if`: what if operations had taken as long as they should
"""
