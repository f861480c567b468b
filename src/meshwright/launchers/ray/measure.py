"""Measure the nodes of a Ray cluster and the links between them: one actor per device, as under torchrun."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.base.files import write_text
from meshwright.clusters import Cluster
from meshwright.errors import MeshwrightError
from meshwright.launchers.ray.driver import connected
from meshwright.launchers.ray.rank import Rank
from meshwright.measurement.measure import check_output

Tell = Callable[[str, int, int], None]  # name of the measurement, work done, work in all
_START = 120.0  # seconds for actors to start


class Measurer(Rank):
    """Actor that is one rank of the measurement."""

    def measure(self, name: str, place: dict[str, str], events: Any) -> str | MeshwrightError:
        """Return the text of the cluster file on the first rank, or the error that ended the measurement.

        Samples so far stay in a folder of the first node: an interrupted measurement goes on from there.
        """
        from meshwright.measurement.worker import measure

        os.environ.update(place)
        folder = Path(tempfile.gettempdir()) / "meshwright-measure"
        folder.mkdir(exist_ok=True)
        output = folder / f"{place['RANK']}-{name}"
        try:
            found = measure(str(output), tell=lambda *now: events.put(now) if place["RANK"] == "0" else None)
        except MeshwrightError as error:
            return error
        return output.read_text("utf-8") if found else ""


def measure(output: str, devices: int = 0, tell: Tell = lambda name, done, of: None, *, address: str = "") -> Cluster:
    """Measure all nodes of a running Ray cluster: their accelerators, or `devices` CPU ranks on each (default one)."""
    check_output(output)
    ray = connected(address)
    from ray.util.queue import Queue

    try:
        queue = Queue(actor_options={"num_cpus": 0})
        members = _members(ray, devices)
        host, port, _ = ray.get(members[0][0].met.remote(), timeout=_START)
        shared = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(len(members))}
        name = Path(output).name
        running = [actor.measure.remote(name, shared | place, queue) for actor, place in members]
        text = _text(ray, running, queue, tell)
    finally:
        ray.shutdown()
    write_text(output, text)
    return Cluster.from_toml(output)


def _members(ray: Any, devices: int) -> list[tuple[Any, dict[str, str]]]:
    """Return (actor, environment) of every rank, node by node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: str(node["NodeManagerAddress"]))
    accelerators = any(node["Resources"].get("GPU") for node in nodes)
    found: list[tuple[Any, dict[str, str]]] = []
    for index, node in enumerate(nodes):
        count = int(node["Resources"].get("GPU", 0)) if accelerators else devices or 1
        where = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        for local in range(count):
            # Each rank sees all devices of a node, and takes the one of its local rank.
            seen = {"runtime_env": {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}}
            options = {"num_gpus": 1, **seen} if accelerators else {"num_cpus": 0}
            place = {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": index, "RANK": len(found)}
            actor = ray.remote(Measurer).options(scheduling_strategy=where, **options).remote()
            found.append((actor, {name: str(value) for name, value in place.items()}))
    return found


def _text(ray: Any, running: list[Any], queue: Any, tell: Tell) -> str:
    """Return the cluster file written by the first rank; the first error ends all ranks."""
    left, said = list(running), ""
    while left:
        ended, left = ray.wait(left, num_returns=1, timeout=0.5)
        for now in queue.get_nowait_batch(queue.qsize()) if queue.qsize() else ():
            tell(*now)
        for one in ended:
            try:
                result = ray.get(one)
            except ray.exceptions.RayError as error:
                raise MeshwrightError(f"a process of the measurement was lost: {str(error).strip()[:300]}") from None
            if isinstance(result, MeshwrightError):
                raise result
            said = result or said
    return said
