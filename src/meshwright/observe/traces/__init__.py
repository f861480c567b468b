"""Profiler traces as columns: `read_trace` is the way in, `read_cached` the shorter one the second time."""

from meshwright.observe.traces.cache import read_cached
from meshwright.observe.traces.categories import Category
from meshwright.observe.traces.columns import NONE
from meshwright.observe.traces.ranks import rank_of
from meshwright.observe.traces.reading import read_trace
from meshwright.observe.traces.trace import Note, Trace, Track

__all__ = ["NONE", "Category", "Note", "Trace", "Track", "rank_of", "read_cached", "read_trace"]
