"""Gradient compression: codecs, written as two short functions each, for CPUs and GPUs.

>>> codec("int8").bytes([1_000_000]) < 1_020_000
True
"""

from meshwright.compression.codec import Codec, codec, codecs

__all__ = ["Codec", "codec", "codecs"]
