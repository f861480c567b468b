"""The pod of a node for Kubernetes: one torchrun, all devices of the node, shared memory and volumes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from meshwright.clusters import Device, reported_names
from meshwright.errors import InputError
from meshwright.launchers.placement import Alike
from meshwright.launchers.request import GRACE, Request
from meshwright.launchers.slurm import for_group
from meshwright.launchers.torchrun import torchrun
from meshwright.launchers.vendors import vendor_of, visible

PLAN_FOLDER = "/etc/meshwright"
_LARGEST_MAP = 1_000_000  # bytes; Kubernetes' limit is 1 MiB with everything
RESTARTS = 10  # of a job that keeps checkpoints, before it counts as failed


@dataclass(frozen=True)
class ClusterOptions:
    """Options of a Kubernetes cluster."""

    image: str
    mounts: Sequence[str] = ()  # CLAIM:/PATH, volumes that all pods see
    selectors: Sequence[str] = ()  # KEY=VALUE labels of nodes, once for all or once for each group

    def claims(self) -> dict[str, str]:
        """Return the names of volume claims by mount path."""
        found: dict[str, str] = {}
        for text in self.mounts:
            match = re.fullmatch(r"([a-z0-9][a-z0-9.-]*):(/[^:]*[^:/])/?", text)
            if not match:
                raise InputError(f"'{text}' is no volume", field="--mount", valid="CLAIM:/PATH, such as shared:/data")
            if match[2] in found:
                raise InputError(f"two volumes at {match[2]}", field="--mount", valid="one for each path")
            found[match[2]] = match[1]
        return found


def check(request: Request, site: ClusterOptions) -> None:
    """Raise on mistakes that would only show inside a pod."""
    if not site.image:
        raise InputError("is needed for pods", field="--image", valid="an image that has meshwright[run]")
    output, claims = request.run.output, site.claims()
    if output and not any(output == path or output.startswith(f"{path}/") for path in claims):
        problem = "is in no volume: it would be lost with the pod, and no other pod would see it"
        valid = f"a folder under {' or '.join(claims)}" if claims else "--mount CLAIM:/PATH, and a folder under /PATH"
        raise InputError(problem, file=output, field="--output", valid=valid)


def pod(request: Request, some: Alike, site: ClusterOptions, node: str, address: str, port: str) -> dict[str, Any]:
    """Return the pod of each of these nodes; `node` is the shell expression of a node's number."""
    device = request.job.cluster.groups[some.group].device
    words = torchrun(request, some, node="@", address="@", port="@")
    here = {"--node-rank=@": f"--node-rank={node}", "--master-addr=@": f"--master-addr={address}",
            "--master-port=@": f"--master-port={port}"}  # fmt: skip
    # Kubernetes expands $(NAME) and $$ in commands before the shell; user text must stay as it is.
    command = "exec " + " ".join(here.get(word) or shlex.quote(word).replace("$", "$$") for word in words)
    environment = visible(device, some) | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE - 20), "PYTHONUNBUFFERED": "1"}
    container: dict[str, Any] = {
        "name": "pytorch",
        "image": site.image,
        "command": ["/bin/sh", "-c", command],
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "volumeMounts": [{"name": name, "mountPath": path} for name, path, _ in _volumes(request, site)],
    }
    if resource := vendor_of(device).kubernetes:
        container["resources"] = {"limits": {resource: some.size}}
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": GRACE,
        "containers": [container],
        "volumes": [{"name": name, **source} for name, _, source in _volumes(request, site)],
    }
    if labels := _labels(request, some, site, device):
        spec["nodeSelector"] = labels
    return spec


def plan_map(request: Request) -> dict[str, Any]:
    """Return the config map that holds the plan for every pod."""
    written = msgspec.structs.replace(request.plan, search=None, estimate=None).to_json()
    if len(written) > _LARGEST_MAP:
        problem = f"is {len(written):,} bytes long, a ConfigMap holds {_LARGEST_MAP:,}"
        raise InputError(problem, file=request.file, valid="a plan without a custom table")
    metadata = {"name": f"{request.name}-plan"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"plan.json": written}}


def _volumes(request: Request, site: ClusterOptions) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (name, path, source) of every volume. Processes share batches and NCCL's buffers through memory."""
    found: list[tuple[str, str, dict[str, Any]]] = [
        ("plan", PLAN_FOLDER, {"configMap": {"name": f"{request.name}-plan"}}),
        ("shared-memory", "/dev/shm", {"emptyDir": {"medium": "Memory"}}),
    ]
    for i, (path, claim) in enumerate(site.claims().items()):
        found.append((f"volume-{i}", path, {"persistentVolumeClaim": {"claimName": claim}}))
    return found


def _labels(request: Request, some: Alike, site: ClusterOptions, device: Device) -> dict[str, str]:
    """Return the node labels of a group: the given ones, else those of NVIDIA's feature discovery if groups differ.

    nvidia.com/gpu.product is the driver's name, with dashes for spaces (NVIDIA/k8s-device-plugin,
    docs/gpu-feature-discovery).
    """
    groups = request.job.cluster.groups
    if given := for_group(site.selectors, some.group, len(groups), "--node-selector"):
        key, equals, value = given.partition("=")
        if not (key and equals and value):
            raise InputError(f"'{given}' is no label", field="--node-selector", valid="KEY=VALUE")
        return {key: value}
    if len({group.device.name for group in groups}) == 1:
        return {}
    names = reported_names(device.name) if device.vendor == "nvidia" else ()
    if not names:
        problem = f"nothing tells nodes of {device.name} from the others"
        valid = f"KEY=VALUE, {len(groups)} times, in the order of the plan's cluster"
        raise InputError(problem, field="--node-selector", valid=valid)
    return {"nvidia.com/gpu.product": names[0].replace(" ", "-")}
