"""Choice of compression by simulating the step with measured costs: codec, number of pieces and topology."""

from meshwright.compression.auto.choose import Decision, decide
from meshwright.compression.auto.inputs import Auto, Facts, Link, Unit, Way, usual

__all__ = ["Auto", "Decision", "Facts", "Link", "Unit", "Way", "decide", "usual"]
