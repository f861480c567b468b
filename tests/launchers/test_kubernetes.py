"""Kubernetes' manifests: against the published schemas, and their commands against shell and torchrun's own parser."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from torch.distributed.run import get_args_parser

import meshwright as mw
from meshwright.errors import InputError
from meshwright.launchers.kubernetes import Kind, manifests, text
from meshwright.launchers.pods import ClusterOptions
from meshwright.launchers.request import Request
from meshwright.launchers.torchrun import AGENT
from meshwright.run.options import Training
from tests.launchers.plans import request, using

SCHEMA = json.loads((Path(__file__).parent / "data/kubernetes.schema.json").read_text())
SITE = ClusterOptions("registry/train:1", mounts=["shared:/data"])
TWO_KINDS = "2x8xa100-80gb+4x8xv100-32gb", list(range(48))


def valid(documents: list[dict[str, Any]]) -> None:
    checker = jsonschema.Draft202012Validator(SCHEMA)
    for document in documents:
        checker.evolve(schema={**SCHEMA, "oneOf": [{"$ref": f"#/$defs/{document['kind']}"}]}).validate(document)


def command(spec: dict[str, Any], **environment: str) -> Any:
    """torchrun's arguments in a pod with an environment, as a shell would make them."""
    shell, flag, line = spec["containers"][0]["command"]
    assert (shell, flag) == ("/bin/sh", "-c")
    agent = f"exec {shlex.join(AGENT)} "
    assert line.startswith(agent)
    # Kubernetes' own reading of a command: $$ is $, $(NAME) a variable; others stay (API reference, Container.command).
    assert not re.search(r"(?<!\$)\$\([A-Z]", line)
    echo = line.replace(agent, "printf '%s\\n' ", 1).replace("$$", "$")
    done = subprocess.run([shell, flag, echo], env=environment, capture_output=True, text=True, check=True)
    return get_args_parser().parse_args(done.stdout.splitlines())


CASES: list[tuple[str, list[int], Kind]] = [
    ("1x8xh100", list(range(8)), "jobset"),
    ("1x8xh100", list(range(8)), "pytorchjob"),
    ("4x8xmi300x", list(range(32)), "jobset"),
    ("4x8xmi300x", list(range(32)), "pytorchjob"),
    ("2x8xascend-910b", list(range(16)), "jobset"),
    ("2x8xh100", list(range(12)), "pytorchjob"),
    ("2x2xcpu", list(range(4)), "jobset"),
    (*TWO_KINDS, "jobset"),
]


@pytest.mark.parametrize("output", ["", "/data/run"])
@pytest.mark.parametrize(("cluster", "devices", "kind"), CASES)
def test_schemas_accept_what_is_written(cluster: str, devices: list[int], kind: Kind, output: str) -> None:
    asked = request(using(cluster, devices), output=output)
    documents = manifests(asked, SITE, kind)
    valid(documents)
    assert list(yaml.safe_load_all(text(asked, SITE, kind))) == documents
    assert mw.Plan.parse(documents[0]["data"]["plan.json"]) == asked.plan


def test_the_schema_can_refuse() -> None:
    plan, job = manifests(request(using("1x8xh100", list(range(8)))), SITE)
    job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["contianers"] = []
    with pytest.raises(jsonschema.ValidationError):
        valid([plan, job])


def test_kinds_of_nodes_are_replicated_jobs() -> None:
    _, job = manifests(request(using(*TWO_KINDS), output="/data/run"), SITE)
    jobs = job["spec"]["replicatedJobs"]
    assert [each["template"]["spec"]["completions"] for each in jobs] == [2, 4]
    specs = [each["template"]["spec"]["template"]["spec"] for each in jobs]
    # The labels of NVIDIA's feature discovery for these devices, from its documentation.
    assert [spec["nodeSelector"]["nvidia.com/gpu.product"] for spec in specs] == [
        "NVIDIA-A100-SXM4-80GB",
        "Tesla-V100-SXM2-32GB",
    ]
    found = [command(specs[k], JOB_COMPLETION_INDEX=str(i)) for k, i in ((0, 0), (0, 1), (1, 0), (1, 3))]
    assert [arguments.node_rank for arguments in found] == [0, 1, 2, 5]
    # <jobset>-<replicated job>-<job index>-<pod index>.<subdomain>: JobSet's definition, spec.network.enableDNSHostnames
    first = f"{job['metadata']['name']}-{jobs[0]['name']}-0-0.{job['spec']['network']['subdomain']}"
    assert {(a.nnodes, a.nproc_per_node, a.master_addr) for a in found} == {("6", "8", first)}
    assert len(first.split(".")[0]) <= 63
    assert found[0].training_script_args[:3] == ["train", "--plan", "/etc/meshwright/plan.json"]


@pytest.mark.parametrize(
    ("cluster", "resource"),
    [("1x8xh100", "nvidia.com/gpu"), ("1x8xmi300x", "amd.com/gpu"), ("1x8xascend-910b", "huawei.com/Ascend910")],
)
def test_devices_are_counted_in_the_makers_words(cluster: str, resource: str) -> None:
    _, job = manifests(request(using(cluster, [0, 1, 2, 3])), SITE)
    (container,) = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {resource: 8}
    (hidden,) = (each["value"] for each in container["env"] if each["name"].endswith("VISIBLE_DEVICES"))
    assert hidden == "0,1,2,3"


def test_a_pytorchjob_has_its_operators_words() -> None:
    _, job = manifests(request(using("2x8xh100", list(range(12)))), SITE, "pytorchjob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert [(name, each["replicas"]) for name, each in replicas.items()] == [("Master", 1), ("Worker", 1)]
    set_by_operator = {"RANK": "1", "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2"}
    found = command(replicas["Worker"]["template"]["spec"], **set_by_operator)
    assert (found.node_rank, found.master_addr, found.master_port, found.nproc_per_node) == (
        1,
        "train-master-0",
        23456,
        "4",
    )
    assert (
        replicas["Master"]["template"]["spec"]["containers"][0]["name"] == "pytorch"
    )  # by which the operator knows it


def refused(words: str, plan: mw.Plan, site: ClusterOptions = SITE, kind: Kind = "jobset", **run: Any) -> None:
    with pytest.raises(InputError, match=words):
        manifests(request(plan, **run), site, kind)


def test_mistakes() -> None:
    one = using("1x8xh100", list(range(8)))
    refused("--image: is needed", one, ClusterOptions(""))
    refused("--output: is in no volume", one, output="/scratch/run")
    refused("--output: is in no volume", one, ClusterOptions("i"), output="run")
    refused("--mount: 'shared' is no volume", one, ClusterOptions("i", ["shared"]))
    refused("--mount: two volumes at /data", one, ClusterOptions("i", ["a:/data", "b:/data/"]))
    refused("--node-selector: 'a100' is no label", one, ClusterOptions("i", selectors=["a100"]))
    refused("--kind: nodes are of 2 sorts", using(*TWO_KINDS), kind="pytorchjob")
    refused("--node-selector: nothing tells nodes of mi300x", using("1x8xh100+1x8xmi300x", list(range(16))))
    refused("launch does not know how schedulers count tpu-v4", using("1x4xtpu-v4", [0, 1]))


def test_paths_with_odd_characters_reach_the_command() -> None:
    plan = using("1x8xh100", list(range(8)))
    asked = Request(plan.resolve(), plan, "plan.json", Training(steps=1, data="/data/it's $(HOME) $$"))
    _, job = manifests(asked, SITE)
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert command(spec).training_script_args[-1] == "/data/it's $(HOME) $$"
