"""Vendors' names for devices: the environment variable that hides some, and the resources that schedulers count."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.clusters import Device
from meshwright.errors import InputError
from meshwright.launchers.placement import Alike


@dataclass(frozen=True)
class Vendor:
    """Names that a vendor's devices have in its tools."""

    visible: str = ""  # environment variable: devices that a process sees
    kubernetes: str = ""  # extended resource of the vendor's device plugin
    ray: str = "GPU"  # resource that Ray counts


# Sources: NVIDIA/k8s-device-plugin README; ROCm/k8s-device-plugin README (amd.com/gpu) and HIP's documentation of
# HIP_VISIBLE_DEVICES; Ascend's device plugin (huawei.com/Ascend910) and CANN's ASCEND_RT_VISIBLE_DEVICES; Ray 2.60,
# ray/_private/accelerators/{nvidia_gpu,amd_gpu,npu}.py.
VENDORS = {
    "nvidia": Vendor("CUDA_VISIBLE_DEVICES", "nvidia.com/gpu"),
    "amd": Vendor("HIP_VISIBLE_DEVICES", "amd.com/gpu"),
    "huawei": Vendor("ASCEND_RT_VISIBLE_DEVICES", "huawei.com/Ascend910", "NPU"),
}
_CPU = Vendor(ray="CPU")


def vendor_of(device: Device) -> Vendor:
    """Return the names of a device's vendor; devices of unknown vendors cannot be requested."""
    if device.name == "cpu":
        return _CPU
    if device.vendor not in VENDORS:
        problem = f"launch does not know how schedulers count {device.name} ({device.vendor})"
        valid = f"devices of {', '.join(VENDORS)} (a cluster's file may say the vendor), or cpu"
        raise InputError(problem, field="job.cluster", valid=valid)
    return VENDORS[device.vendor]


def visible(device: Device, some: Alike) -> dict[str, str]:
    """Return the environment of ranks on nodes with idle devices: ranks see only the devices that are used.

    >>> from meshwright.clusters import Cluster
    >>> h100 = Cluster.preset("1x8xh100").device(0)
    >>> visible(h100, Alike(0, 1, 8, (4, 5), 0, 0)), visible(h100, Alike(0, 1, 2, (0, 1), 0, 0))
    ({'CUDA_VISIBLE_DEVICES': '4,5'}, {})
    """
    name = vendor_of(device).visible
    return {} if some.whole or not name else {name: ",".join(map(str, some.locals))}
