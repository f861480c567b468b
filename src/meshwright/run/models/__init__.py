"""Models: one module per layer of a plan's chain of layers, for every family that can be trained."""

from meshwright.run.models.context import Context
from meshwright.run.models.decoder import Decoder, build, fresh

__all__ = ["Context", "Decoder", "build", "fresh"]
