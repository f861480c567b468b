"""Synchronisation of gradients through codecs: pieces encode while others are on the wire, and nothing waits for ever."""

from meshwright.compress.sync.attach import register
from meshwright.compress.sync.bucket import Gradients
from meshwright.compress.sync.failure import PeerLost
from meshwright.compress.sync.hook import Synchroniser, hook
from meshwright.compress.sync.layout import Choice
from meshwright.compress.sync.options import Options
from meshwright.compress.sync.sharded import Sharded, register_sharded
from meshwright.compress.sync.wire import Traffic

__all__ = [
    "Choice",
    "Gradients",
    "Options",
    "PeerLost",
    "Sharded",
    "Synchroniser",
    "Traffic",
    "hook",
    "register",
    "register_sharded",
]
