"""Run codecs on a CPU with one thread, like the copies they are compared with and the counting of their work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread of PyTorch in the block: threads that wait for each other would count as work.

    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
