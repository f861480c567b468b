"""NumPy, loaded so that its threads sleep while there is nothing to do; importing this module is all there is to it.

OpenBLAS, which NumPy brings, starts a thread per core with itself, and each of them turns idly for 2**26 cycles (25 ms)
before it sleeps: a tenth of what a trace takes on two cores, seconds on a hundred. Traces need no matrix products.
Threads are as many as ever, and 2**20 cycles (0.4 ms) still bridge the gap between one product and the next.
"""

from __future__ import annotations

from meshwright.traces.first_import import first_import

with first_import("numpy", "OPENBLAS_THREAD_TIMEOUT", "20"):  # the power of two
    import numpy  # noqa: F401
