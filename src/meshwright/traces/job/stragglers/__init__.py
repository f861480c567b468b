"""Straggling ranks and links, and their cost.

- `operation_records`: jobs recorded operation by operation, as the published straggler jobs are
- `slow_links`: links on which the same collective takes longer than on others
- `slow_ranks`: ranks that are slower than others with equal work, by how much, and since when
- `stragglers`: stragglers of a job, their causes and their cost
- `what_if`: simulation of a job without slow operations
"""
