"""One module per layer of the chain that plans speak of, for every family that can be trained."""

from meshwright.run.models.context import Context
from meshwright.run.models.decoder import Decoder, build, fresh

__all__ = ["Context", "Decoder", "build", "fresh"]
