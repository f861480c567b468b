"""Hardware to train on: devices, links and topology, a catalogue, and groups of different kinds."""

from meshwright.clusters.catalogue import device, device_aliases, device_names, reported_names, source
from meshwright.clusters.cluster import Cluster
from meshwright.clusters.device import Device, Group, Link
from meshwright.clusters.parsing import MOST_DEVICES

__all__ = [
    "MOST_DEVICES", "Cluster", "Device", "Group", "Link", "device", "device_aliases", "device_names", "reported_names",
    "source",
]  # fmt: skip
