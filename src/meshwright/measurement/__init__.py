"""Microbenchmarks of compute, memory and links, and the cluster file that they write."""
