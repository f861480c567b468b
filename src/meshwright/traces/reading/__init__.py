"""Profiler traces as columns: `read_trace` reads a file, `read_cached` prefers its cache."""

from meshwright.traces.reading.cache.cache import read_cached
from meshwright.traces.reading.categories import Category
from meshwright.traces.reading.columns import NONE
from meshwright.traces.reading.ranks import rank_of
from meshwright.traces.reading.reading import read_trace
from meshwright.traces.reading.trace import Note, Trace, Track

__all__ = ["NONE", "Category", "Note", "Trace", "Track", "rank_of", "read_cached", "read_trace"]
