"""Training data: text to tokens, tokens to samples, the same samples under every plan.

Everything here is numpy, so that `meshwright prepare` starts without torch. Only `prefetch`, which moves samples to a
device, imports it.
"""

from meshwright.run.data.batches import PADDING, Batches, Samples, Source
from meshwright.run.data.dataset import Dataset
from meshwright.run.data.opening import open_data
from meshwright.run.data.prepare import prepare
from meshwright.run.data.synthetic import Synthetic

__all__ = ["PADDING", "Batches", "Dataset", "Samples", "Source", "Synthetic", "open_data", "prepare"]
