"""Synchronisation of gradients through codecs: encoding overlaps with communication, and every wait has a limit."""

from meshwright.compression.sync.bucket import Gradients
from meshwright.compression.sync.ddp import register
from meshwright.compression.sync.fsdp import Sharded, register_sharded
from meshwright.compression.sync.layout import Choice
from meshwright.compression.sync.options import Options
from meshwright.compression.sync.synchroniser import Synchroniser, hook
from meshwright.compression.sync.transport.failure import PeerLost
from meshwright.compression.sync.transport.wire import Traffic

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
