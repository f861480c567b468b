"""Whether to compress, how, in how many parts and over which topology: by simulating the pipeline with what was measured."""

from meshwright.compression.auto.choose import Decision, decide
from meshwright.compression.auto.inputs import Auto, Facts, Link, Unit, Way, usual

__all__ = ["Auto", "Decision", "Facts", "Link", "Unit", "Way", "decide", "usual"]
