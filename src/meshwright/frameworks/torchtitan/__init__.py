"""torchtitan 0.3.0: a Python module whose function returns its `Trainer.Config`, and such functions as plans.

That version is started with `--module MODULE --config FUNCTION`, and flags such as
`--parallelism.tensor_parallel_degree 8` (torchtitan/config/manager.py); it reads no other kind of file.
"""

from __future__ import annotations

from meshwright.frameworks.contract import Format
from meshwright.frameworks.torchtitan.read import READ, read
from meshwright.frameworks.torchtitan.write import write

FORMAT = Format("torchtitan", "torchtitan", "torchtitan", write, read, frozenset(READ))
