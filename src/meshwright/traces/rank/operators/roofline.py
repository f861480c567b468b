"""Best rates of a device: its peak per precision, and its memory bandwidth."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from meshwright.errors import UnknownName
from meshwright.traces.rank.operators.inputs import Cost

# Driver names of boards whose chip the catalogue lists under another name: (name, least GiB, device).
BOARDS = (
    (r"A100-(?:PG|SXM)", 60, "a100-80gb"), (r"A100-(?:PG|SXM)", 0, "a100-40gb"), (r"A100.*PCI", 60, "a100-80gb-pcie"),
    (r"V100-(?:DGXS|SXM\d|FHHL)-32GB", 0, "v100-32gb"), (r"V100-(?:DGXS|SXM\d)-16GB", 0, "v100-16gb"),
    (r"MI300X", 0, "mi300x"), (r"MI325X", 0, "mi325x"), (r"MI355X", 0, "mi355x"), (r"MI250", 0, "mi250"),
    (r"H100.*NVL", 0, "h100-nvl"), (r"H100.*PCIe", 0, "h100-pcie"), (r"H100.*80GB", 0, "h100"), (r"H800", 0, "h800"),
    (r"H200", 0, "h200"), (r"GB300", 0, "gb300"), (r"B300", 0, "b300"), (r"GB200", 0, "gb200"), (r"B200", 0, "b200"),
    (r"910B", 0, "ascend-910b"), (r"RTX 4090", 0, "rtx4090"), (r"RTX 3090", 0, "rtx3090"),
)  # fmt: skip


@dataclass(frozen=True)
class Roofline:
    """Peaks of a device in the catalogue."""

    device: str  # the catalogue's name
    flops: dict[str, float]  # FLOP/s by precision
    bandwidth: float  # bytes/s

    def bound(self, cost: Cost, seconds: float, precision: str) -> tuple[float, str]:
        """Return (the least possible time relative to the measured one, its limit).

        >>> Roofline("mine", {"bf16": 1e12}, 1e9).bound(Cost(10**9, 10**6, "bf16"), 0.002, "bf16")
        (0.5, 'compute')
        """
        peak = self.flops.get(precision, 0.0)
        least = {"compute": cost.flops / peak if peak else 0.0, "memory": cost.bytes / self.bandwidth}
        what = max(least, key=lambda name: least[name])
        return (least[what] / seconds, what) if seconds > 0 and least[what] > 0 else (0.0, "")


def roofline(properties: dict[str, Any]) -> Roofline | None:
    """Return the roofline of a device from `deviceProperties`, or None if the catalogue lacks it.

    >>> roofline({"name": "NVIDIA A100-PG509-200", "totalGlobalMem": 42505273344}).device
    'a100-40gb'
    """
    from meshwright.clusters import catalogue  # takes 50 ms, which traces without shapes can skip

    name = str(properties.get("name") or "")
    size = properties.get("totalGlobalMem")
    gib = size / 2**30 if isinstance(size, int | float) else 0.0
    try:
        key = catalogue.find_device(name) if name else ""
    except UnknownName:
        key = next((key for text, least, key in BOARDS if gib >= least and re.search(text, name)), "")
    if not key:
        return None
    found = catalogue.device(key)
    return Roofline(key, found.flops, found.memory_bandwidth)
