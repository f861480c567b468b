"""Import NumPy so that its idle threads sleep; importing this module is all that is needed.

OpenBLAS, which comes with NumPy, starts a thread per core, and each spins for 2**26 cycles (25 ms) before it sleeps.
That is a tenth of a trace's analysis on two cores, and seconds on a hundred. Traces need no matrix products. The number
of threads stays the same, and 2**20 cycles (0.4 ms) still bridge the gap between two products.
"""

from __future__ import annotations

from meshwright.traces.first_import import first_import

with first_import("numpy", "OPENBLAS_THREAD_TIMEOUT", "20"):  # exponent of a power of two
    import numpy  # noqa: F401
