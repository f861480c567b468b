"""Manifests for Kubernetes: a JobSet, or Kubeflow's PyTorchJob.

- JobSet (jobset.x-k8s.io/v1alpha2): one replicated job for each kind of node; all start again together when one fails.
  Its pods are named `<jobset>-<replicated job>-<job>-<pod>.<jobset>`, and the others find the first by its name.
- PyTorchJob (kubeflow.org/v1): a master and workers that are all alike; the operator sets RANK.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import yaml

from meshwright.errors import InputError
from meshwright.launchers.placement import Alike
from meshwright.launchers.pods import PLAN_FOLDER, RESTARTS, ClusterOptions, check, plan_map, pod
from meshwright.launchers.request import PORT, Request

Kind = Literal["jobset", "pytorchjob"]
_OPERATORS_PORT = 23456  # that PyTorchJob's service has by default


def manifests(request: Request, site: ClusterOptions, kind: Kind = "jobset") -> list[dict[str, Any]]:
    """Return the plan and the job as manifests for `kubectl apply`."""
    check(request, site)
    request = inside(request.started_again())
    job = jobset(request, site) if kind == "jobset" else pytorchjob(request, site)
    return [plan_map(request), job]


def text(request: Request, site: ClusterOptions, kind: Kind = "jobset") -> str:
    """Return the manifests as YAML, with a comment above that lists ranks by node."""
    head = "".join(f"# {line}\n" for line in request.lines)
    written: str = yaml.dump_all(manifests(request, site, kind), Dumper=_Dumper, sort_keys=False, width=1000)
    return head + written


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes text of several lines as a block."""


def _string(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _string)


def inside(request: Request) -> Request:
    """Return the request with paths as a pod sees them."""
    return replace(request, file=f"{PLAN_FOLDER}/plan.json")


def jobset(request: Request, site: ClusterOptions) -> dict[str, Any]:
    every = request.nodes
    names = [f"nodes-{i}" for i in range(len(every))]
    address = f"{request.name}-{names[0]}-0-0.{request.name}"
    jobs = []
    for name, some in zip(names, every, strict=True):
        node = f"$(({some.first_node} + JOB_COMPLETION_INDEX))" if some.first_node else "$JOB_COMPLETION_INDEX"
        spec = {"restartPolicy": "Never", **pod(request, some, site, node, address, str(PORT))}
        work = {
            "completionMode": "Indexed",
            "completions": some.nodes,
            "parallelism": some.nodes,
            "backoffLimit": 0,  # the set starts again as a whole
            "template": {"spec": spec},
        }
        jobs.append({"name": name, "replicas": 1, "template": {"spec": work}})
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": request.name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": RESTARTS if request.run.output else 0},
        "replicatedJobs": jobs,
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": request.name},
        "spec": spec,
    }


def pytorchjob(request: Request, site: ClusterOptions) -> dict[str, Any]:
    every = request.nodes
    first, rest = every[0], sum(some.nodes for some in every) - 1
    if len(every) > 2 or (len(every) == 2 and first.nodes > 1):
        problem = f"nodes are of {len(every)} sorts, a PyTorchJob has one master and workers that are alike"
        raise InputError(problem, field="--kind", valid="jobset")
    replicas = {"Master": _replica(request, first, site, 1)}
    if rest:
        replicas["Worker"] = _replica(request, every[-1], site, rest)
    policy = {"cleanPodPolicy": "None", "backoffLimit": RESTARTS if request.run.output else 0}
    spec = {"nprocPerNode": str(first.per_node), "runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": request.name}, "spec": spec}


def _replica(request: Request, some: Alike, site: ClusterOptions, count: int) -> dict[str, Any]:
    """Return one replica group of a PyTorchJob.

    The operator sets RANK (of the pod), MASTER_ADDR and MASTER_PORT (kubeflow/training-operator,
    pkg/controller.v1/pytorch/envvar.go); torchrun sets them anew for its processes.
    """
    spec = pod(request, some, site, '"$RANK"', '"$MASTER_ADDR"', '"$MASTER_PORT"')
    spec["containers"][0]["ports"] = [{"name": "pytorchjob-port", "containerPort": _OPERATORS_PORT}]
    again = "OnFailure" if request.run.output else "Never"
    return {"replicas": count, "restartPolicy": again, "template": {"spec": spec}}
