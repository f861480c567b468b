"""Arrow with the system's allocator: its own keeps 20 to 40 MiB in every process that reads traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.traces.first_import import first_import


@contextmanager
def returning_memory() -> Iterator[None]:
    """Use the system's allocator for Arrow in the block, so that memory is returned; raises ImportError without Arrow.

    >>> import pyarrow
    >>> with returning_memory():
    ...     pyarrow.default_memory_pool().backend_name
    'system'
    """
    # Parquet's encoder cannot be configured: it takes the allocator that Arrow was loaded with.
    with first_import("pyarrow", "ARROW_DEFAULT_MEMORY_POOL", "system") as is_ours:
        import pyarrow as pa
    before = pa.default_memory_pool()
    if is_ours:  # the default for everything else in this process
        before = getattr(pa, f"{pa.supported_memory_backends()[0]}_memory_pool")()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)
