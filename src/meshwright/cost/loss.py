"""How many tokens a loss in chunks takes at a time: what the runtime does, and what its memory is counted by."""

from __future__ import annotations

from typing import Any

import numpy as np

# The weight's gradient is rounded once per chunk where it is added up: few chunks, and each large enough for the matrix
# units.
CHUNKS, LEAST = 8, 4096


def loss_chunk(rows: Any) -> Any:
    """Tokens at a time, of so many: an eighth, and 4,096 at least.

    >>> [int(loss_chunk(rows)) for rows in (100, 8192, 131072)]
    [4096, 4096, 16384]
    """
    return np.maximum(LEAST, -(-rows // CHUNKS))
