"""On what? Devices, links and topology; a catalogue of real hardware; groups of different kinds."""

from meshwright.cluster.catalogue import device, device_aliases, device_names, reported_names, source
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.device import Device, Group, Link
from meshwright.cluster.written import MOST_DEVICES

__all__ = [
    "MOST_DEVICES", "Cluster", "Device", "Group", "Link", "device", "device_aliases", "device_names", "reported_names",
    "source",
]  # fmt: skip
