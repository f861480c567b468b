"""Train on a cluster of Ray: one bundle of a placement group per node, one actor per process.

Ray keeps the nodes of the group apart (STRICT_SPREAD) and starts the actors; the processes then meet and train as under
torchrun. Events come back through a queue of Ray's; the first failure ends all.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshwright.cluster import Device
from meshwright.cost.estimate import Estimate
from meshwright.errors import InputError, MeshwrightError
from meshwright.launch.placement import Alike
from meshwright.launch.ray_rank import Rank, ask_to_end
from meshwright.launch.request import Request
from meshwright.launch.vendors import vendor_of, visible
from meshwright.run.front import make_folders
from meshwright.run.launch import AT_ONCE, STOPPING, TrainingFailed, Work

Event = dict[str, Any]
Bundle = dict[str, float]
_ROOM = 600.0  # seconds to wait for nodes: others may be using them, or they have yet to start
_KNOWN = 2.0  # seconds that others get to say why, once one has failed
_NOT_HIDDEN = ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
               "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES")  # fmt: skip


def bundles(request: Request) -> list[Bundle]:
    """What each node must have, in the order of ranks: all its devices, and a core for every process.

    >>> import meshwright as mw
    >>> from meshwright.run.options import Training
    >>> job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("2x8xh100"), 16, seq_len=32)
    >>> bundles(Request(job, mw.Plan.of({"dp": 16}, job), "plan.json", Training(steps=1)))
    [{'GPU': 8.0, 'CPU': 8.0}, {'GPU': 8.0, 'CPU': 8.0}]
    """
    groups = request.job.cluster.groups
    differ = len({group.device.name for group in groups}) > 1
    found = []
    for some in request.nodes:
        device = groups[some.group].device
        needs: Bundle = {vendor_of(device).ray: float(some.size)}
        needs.setdefault("CPU", float(some.per_node))
        if differ:
            needs[f"accelerator_type:{accelerator_type(device)}"] = 0.001
        found += [needs] * some.nodes
    return found


def accelerator_type(device: Device) -> str:
    """What Ray calls a kind of device (ray/util/accelerators); nodes of other kinds must be started with that resource.

    >>> from meshwright.cluster import Cluster
    >>> [accelerator_type(Cluster.preset(name).device(0)) for name in ("a100-40gb", "mi300x", "h100")]
    ['A100', 'AMD-Instinct-MI300X-OAM', 'H100']
    """
    short = device.name.split("-")[0].upper()
    return {"amd": f"AMD-Instinct-{short}-OAM", "huawei": f"Ascend{short.removeprefix('ASCEND')}"}.get(
        device.vendor, short
    )


def train(
    request: Request, promised: Estimate, tell: Callable[[Event], None], *, address: str = "", room: float = _ROOM
) -> None:
    """Train on a running cluster of Ray; returns when the run has ended, raises what ended it too early."""
    ray = connected(address)
    from ray.util.queue import Queue

    work = Work(request.plan.to_table(), request.run, promised.step_seconds, promised.mfu, request.plan.devices)
    try:
        with _asked() as asked:
            group = _nodes(ray, request, room, asked)
            make_folders(request.run)
            queue = Queue(actor_options={"num_cpus": 0})
            members = _start(ray, request, group, room)
            shared = {"MASTER_ADDR": members[0].host, "MASTER_PORT": str(members[0].port)}
            shared["WORLD_SIZE"] = str(work.world)
            running = {
                member.actor.train.remote(work, shared | member.place, queue if rank == 0 else _Nobody()): rank
                for rank, member in enumerate(members)
            }
            _watch(ray, members, running, queue, tell, asked)
    finally:
        ray.shutdown()  # ends what this program has started: actors, the queue, the placement group


@dataclass(frozen=True)
class _Member:
    """One process of the run."""

    actor: Any
    place: dict[str, str]  # its own part of the environment
    host: str
    port: int
    process: int
    where: Any  # the node, as Ray's scheduler is told


class _Nobody:
    """Events of all processes but the first are in the run's folder."""

    def put(self, event: Event) -> None:
        pass


def connected(address: str) -> Any:
    """Ray, joined to a running cluster."""
    try:
        import ray
    except ImportError:
        raise InputError("is not installed", field="--on ray", valid="pip install 'meshwright[ray]'") from None
    try:
        _reachable(address)
        ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:  # a refused connection is an OSError
        problem = f"no cluster of Ray answers{f' at {address}' if address else ''}: {_first_line(error)}"
        valid = "HOST:PORT of one; 'ray start --head' starts one here"
        raise InputError(problem, field="--address", valid=valid) from None
    return ray


def _reachable(address: str) -> None:
    """Whether anything listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def _nodes(ray: Any, request: Request, room: float, asked: list[float]) -> Any:
    """The placement group, once its nodes are there."""
    wanted = bundles(request)
    group = ray.util.placement_group(wanted, strategy="STRICT_SPREAD")
    ready, until, said = group.ready(), time.monotonic() + room, False
    while not ray.wait([ready], timeout=0.5)[0]:
        if asked or time.monotonic() > until:
            ray.util.remove_placement_group(group)
            raise TrainingFailed("stopped before it began" if asked else _short_of(ray, wanted))
        if not said and time.monotonic() > until - room + 3:
            said = True
            print(f"waiting: {_short_of(ray, wanted)}", file=sys.stderr)  # noqa: T201
    return group


def _short_of(ray: Any, wanted: list[Bundle]) -> str:
    """What is asked for, and how many nodes of the cluster have as much when nobody uses them."""
    every = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    asks = []
    for needs in {tuple(bundle.items()): bundle for bundle in wanted}.values():
        able = sum(all(node.get(name, 0) >= count for name, count in needs.items()) for node in every)
        named = ", ".join(f"{count:g} {name}" for name, count in needs.items())
        asks.append(f"{wanted.count(needs)} with {named} ({able} such in the cluster)")
    return f"the plan needs nodes of its own: {'; '.join(asks)}"


def _start(ray: Any, request: Request, group: Any, room: float) -> list[_Member]:
    """Every actor, in the order of ranks."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    made = []
    for some in request.nodes:
        device = request.job.cluster.groups[some.group].device
        # All devices of the node are ours, and seen: a process finds its own, and its neighbours'.
        environment = dict.fromkeys(_NOT_HIDDEN, "1") | visible(device, some) if vendor_of(device).visible else {}
        options = {"num_cpus": 1, "runtime_env": {"env_vars": environment} if environment else None} | _share(device)
        for rank in some.ranks:
            node = some.first_node + (rank - some.first_rank) // some.per_node
            where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=node)
            made.append((ray.remote(Rank).options(scheduling_strategy=where, **options).remote(), some, rank, where))
    try:
        met = ray.get([actor.met.remote() for actor, *_ in made], timeout=room)
    except ray.exceptions.RayError as error:
        raise TrainingFailed(f"a process could not be started: {_first_line(error)}") from None
    found = []
    for (actor, some, rank, where), (host, port, process) in zip(made, met, strict=True):
        found.append(_Member(actor, _place(some, rank), host, port, process, where))
    return found


def _share(device: Device) -> dict[str, Any]:
    counted = vendor_of(device).ray
    return {"GPU": {"num_gpus": 1}, "CPU": {}}.get(counted, {"resources": {counted: 1}})


def _place(some: Alike, rank: int) -> dict[str, str]:
    local = (rank - some.first_rank) % some.per_node
    return {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(some.per_node)}


@contextmanager
def _asked() -> Iterator[list[float]]:
    """When somebody asked the run to end."""
    found: list[float] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: found.append(time.monotonic())) for number in numbers]
    try:
        yield found
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _watch(
    ray: Any,
    members: list[_Member],
    running: dict[Any, int],
    queue: Any,
    tell: Callable[[Event], None],
    asked: list[float],
) -> None:
    """Until all have ended; a failure ends the others, a signal asks all to end."""
    failures: list[Event] = []
    told, since = False, float("inf")
    while running and time.monotonic() < since + _KNOWN:
        if asked and not told:
            told = True
            print(STOPPING, file=sys.stderr)  # noqa: T201
            for member in members:
                near = ray.remote(ask_to_end).options(num_cpus=0, scheduling_strategy=member.where)
                near.remote(member.process)
        if len(asked) > 1:
            raise TrainingFailed(AT_ONCE)
        ended, _ = ray.wait(list(running), num_returns=1, timeout=0.2)
        for event in _waiting(queue):
            tell(event)
        for one in ended:
            rank = running.pop(one)
            if failure := _failure(ray, one, rank, asked=bool(asked)):
                failures.append(failure)
                since = min(since, time.monotonic())
    for event in _waiting(queue):
        tell(event)
    if failures and asked and all(failure["consequence"] for failure in failures):
        tell({"event": "stopped", "time": time.time(), "step": 0})  # before the first step: nobody was listening yet
    elif failures:
        raise min(failures, key=lambda failure: (failure["consequence"], failure["time"]))["error"]


def _waiting(queue: Any) -> list[Event]:
    """Events that have come."""
    count = queue.qsize()
    return list(queue.get_nowait_batch(count)) if count else []


def _failure(ray: Any, one: Any, rank: int, *, asked: bool) -> Event | None:
    """What a process says of its end; one that cannot say anything was killed, or is on a node that was lost."""
    try:
        found: Event | None = ray.get(one)
    except ray.exceptions.RayError as error:
        problem = TrainingFailed(f"rank {rank} was lost: {_first_line(error)}")
        return {"error": problem, "consequence": asked, "time": time.time()}
    if found and not isinstance(found["error"], MeshwrightError):
        return found | {"error": TrainingFailed(str(found["error"]))}
    return found


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
