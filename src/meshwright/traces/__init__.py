"""Analysis of profiler traces: from one rank's kernels to a whole job's critical path."""
