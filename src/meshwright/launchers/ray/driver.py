"""Train on a Ray cluster: one bundle of a placement group per node, one actor per rank.

Ray puts each bundle on a node of its own (STRICT_SPREAD) and starts the actors. The ranks then join as under torchrun.
Events come back through a Ray queue; the first failure ends all ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.base.processes import this_machine
from meshwright.clusters import Device
from meshwright.cost.estimate import Estimate
from meshwright.errors import STOPPED, InputError, TrainingFailed
from meshwright.launchers.placement import Alike
from meshwright.launchers.ray.rank import Messages, Rank, ask_to_end
from meshwright.launchers.request import Request
from meshwright.launchers.vendors import vendor_of, visible
from meshwright.run.processes.launch import Work, again, asked_to_stop
from meshwright.run.supervision.stop_signals import AT_ONCE, stopping
from meshwright.run.train import make_folders

Event = dict[str, Any]
Bundle = dict[str, float]
_ROOM = 600.0  # seconds to wait for nodes: others may use them, or they are still starting
_KNOWN = 2.0  # seconds that other ranks get to end once one has reported an error
_PATIENCE = 15.0  # seconds to find the reason once a rank is lost
_TOGETHER = 25.0  # seconds that other ranks get once one has stopped
_NOT_HIDDEN = ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",
               "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES")  # fmt: skip


def bundles(request: Request) -> list[Bundle]:
    """Return each node's resources in the order of ranks: all its devices, and a core for every rank.

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
    """Return Ray's name of a kind of device (ray/util/accelerators); other kinds must be started with that resource.

    >>> from meshwright.clusters import Cluster
    >>> [accelerator_type(Cluster.preset(name).device(0)) for name in ("a100-40gb", "mi300x", "h100")]
    ['A100', 'AMD-Instinct-MI300X-OAM', 'H100']
    """
    short = device.name.split("-")[0].upper()
    return {"amd": f"AMD-Instinct-{short}-OAM", "huawei": f"Ascend{short.removeprefix('ASCEND')}"}.get(
        device.vendor, short
    )


def train(
    request: Request, promised: Estimate, tell: Callable[[Event], None], *, address: str = "", room: float = _ROOM
) -> int:
    """Train on a running Ray cluster until the run has ended; raise the error that ended it.

    Return the signal that stopped it early, or 0.
    """
    ray = connected(address)
    from ray.util.queue import Queue

    work = Work(request.plan.to_table(), request.run, promised.step_seconds, promised.mfu, request.plan.devices)
    try:
        with asked_to_stop() as asked:
            group = _nodes(ray, request, room, asked)
            make_folders(request.run)
            queue = Queue(actor_options={"num_cpus": 0})
            members = _start(ray, request, group, room)
            shared = {"MASTER_ADDR": members[0].host, "MASTER_PORT": str(members[0].port)}
            shared["WORLD_SIZE"] = str(work.world)
            driver = this_machine(), os.getpid()
            running = {
                member.actor.train.remote(work, shared | member.place, driver, Messages(queue, events=rank == 0)): rank
                for rank, member in enumerate(members)
            }
            return _Watch(ray, members, running, queue, tell, asked).until_the_end()
    finally:
        ray.shutdown()  # ends all that this program has started: actors, the queue, the placement group


@dataclass(frozen=True)
class _Member:
    """One rank of the run."""

    actor: Any
    place: dict[str, str]  # the rank's own part of the environment
    host: str
    port: int
    process: int
    where: Any  # the node, as Ray's scheduler names it


def connected(address: str) -> Any:
    """Return Ray, connected to a running cluster."""
    try:
        import ray
    except ImportError:
        raise InputError("is not installed", field="--on ray", valid="pip install 'meshwright[ray]'") from None
    try:
        _reachable(address)
        _errors_to_stderr()
        ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:  # a refused connection is an OSError
        problem = f"no cluster of Ray answers{f' at {address}' if address else ''}: {_first_line(error)}"
        valid = "HOST:PORT of one; 'ray start --head' starts one here"
        raise InputError(problem, field="--address", valid=valid) from None
    return ray


def _errors_to_stderr() -> None:
    """Send Ray's messages on lost workers to standard error, away from the steps (private; seen in Ray 2.60)."""
    from ray._private import worker

    usual = worker.print_to_stdstream

    def to_stderr(data: dict[str, Any], *arguments: Any, **options: Any) -> None:
        usual({**data, "is_err": True}, *arguments, **options)

    worker.print_to_stdstream = to_stderr


def _reachable(address: str) -> None:
    """Raise if nothing listens at HOST:PORT: Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def _nodes(ray: Any, request: Request, room: float, asked: list[tuple[int, float]]) -> Any:
    """Wait for the nodes, and return the placement group."""
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
    """Return the requested resources, and the number of nodes that have as much while idle."""
    every = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    asks = []
    for needs in {tuple(bundle.items()): bundle for bundle in wanted}.values():
        able = sum(all(node.get(name, 0) >= count for name, count in needs.items()) for node in every)
        named = ", ".join(f"{count:g} {name}" for name, count in needs.items())
        asks.append(f"{wanted.count(needs)} with {named} ({able} such in the cluster)")
    return f"the plan needs nodes of its own: {'; '.join(asks)}"


def _start(ray: Any, request: Request, group: Any, room: float) -> list[_Member]:
    """Start every actor, and return them in the order of ranks."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    made = []
    for some in request.nodes:
        device = request.job.cluster.groups[some.group].device
        # Each rank sees all devices of the node: it picks its own, and reaches its neighbours'.
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


class _Watch:
    """Loop that follows the actors of a run until all have ended."""

    def __init__(
        self,
        ray: Any,
        members: list[_Member],
        running: dict[Any, int],
        queue: Any,
        tell: Callable[[Event], None],
        asked: list[tuple[int, float]],
    ) -> None:
        self._ray, self._members, self._running, self._queue = ray, members, running, queue
        self._tell, self._asked = tell, asked
        self._passed_on = self._told = 0  # the signal that all ranks were sent; the one that some rank received
        self._failures: list[Event] = []
        self._lost: dict[int, str] = {}  # ranks that ended without an answer, and Ray's message
        self._codes: list[int] = []
        self._stopped_event = False

    def until_the_end(self) -> int:
        """Wait for the end, and return the signal that stopped the run early, or 0.

        A failure ends the other ranks, and is raised.
        """
        until = float("inf")
        while self._running and time.monotonic() < until:
            self._pass_on()
            ended, _ = self._ray.wait(list(self._running), num_returns=1, timeout=0.2)
            self._take()
            for one in ended:
                self._end(one, self._running.pop(one))
            if self._failures or self._lost or any(self._codes):
                patience = _KNOWN if self._failures else _PATIENCE if self._lost else _TOGETHER
                until = min(until, time.monotonic() + patience)
        self._take()
        if self._failures or self._lost:
            raise self._reason()
        if other := set(self._codes) - {0, STOPPED}:
            raise TrainingFailed(f"a rank ended with code {min(other)}")
        if STOPPED not in self._codes:
            return 0
        if not self._stopped_event:  # before the first step: no rank was listening yet
            self._tell({"event": "stopped", "time": time.time(), "step": 0})
        return self._passed_on or self._told or signal.SIGTERM

    def _pass_on(self) -> None:
        """Ask all ranks to end after a whole step."""
        if again(self._asked):
            raise TrainingFailed(AT_ONCE)
        if self._asked and not self._passed_on:
            self._passed_on = self._asked[0][0]
            if not self._told:
                print(stopping(self._passed_on), file=sys.stderr)  # noqa: T201
            for member in self._members:
                near = self._ray.remote(ask_to_end).options(num_cpus=0, scheduling_strategy=member.where)
                near.remote(member.process)

    def _take(self) -> None:
        """Process the messages that have arrived."""
        count = self._queue.qsize()
        for kind, _, facts in self._queue.get_nowait_batch(count) if count else []:
            if kind == "event":
                self._stopped_event = self._stopped_event or facts["event"] == "stopped"
                self._tell(facts)
            elif kind == "failure":
                self._failures.append(facts)
            elif not self._asked:  # a rank received a signal of its own
                self._told = facts["signal"]
                print(facts["text"], file=sys.stderr)  # noqa: T201

    def _end(self, one: Any, rank: int) -> None:
        """Record how a rank ended. Without an answer it ended itself, was killed, or lost its node."""
        try:
            self._codes.append(int(self._ray.get(one)))
        except self._ray.exceptions.RayError as error:
            self._lost[rank] = _first_line(error)

    def _reason(self) -> Exception:
        if self._failures:
            error: Exception = min(self._failures, key=lambda facts: float(facts["time"]))["error"]
            return error
        rank, why = next(iter(self._lost.items()))
        member = self._members[rank]
        return TrainingFailed(f"rank {rank} ({member.host}, process {member.process}) was lost: {why}")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
