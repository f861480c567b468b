"""`sweep(...)`: the best plan for every number of nodes, batch and sequence, its cost, and the worthwhile points."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from meshwright.base.parallel import in_parallel
from meshwright.clusters import Cluster
from meshwright.cost.estimate import Estimate
from meshwright.cost.page import plan_text
from meshwright.cost.runtime import Runtime, runtime
from meshwright.errors import InputError
from meshwright.models import Model
from meshwright.plans import Job
from meshwright.search.side_search import Question
from meshwright.search.space.limits import Limits


@dataclass(frozen=True)
class Point:
    """One combination: the best plan's results, or why there is none."""

    job: Job
    nodes: int
    best: Estimate | None
    proven: bool = False  # nothing is faster
    problem: str = ""
    worth_it: bool = False  # no other point is faster at no more cost

    @property
    def devices(self) -> int:
        """Devices that are paid for, idle ones included."""
        return self.job.cluster.devices

    @property
    def tokens_per_second(self) -> float:
        return self.job.tokens_per_step / self.best.step_seconds if self.best else 0.0

    @property
    def device_hours(self) -> float:
        """Device hours per billion tokens; infinite where nothing fits."""
        return self.devices * 1e9 / self.tokens_per_second / 3600 if self.best else float("inf")

    def to_table(self, price: float | None = None) -> dict[str, Any]:
        """Return a row; `price` is in dollars per device and hour."""
        row: dict[str, Any] = {
            "nodes": self.nodes, "devices": self.devices, "batch": self.job.global_batch, "seq": self.job.seq_len,
            "fits": self.best is not None, "problem": self.problem,
        }  # fmt: skip
        if self.best:
            row |= {
                "step_time_s": self.best.step_seconds,
                "tokens_per_s": self.tokens_per_second,
                "tokens_per_s_per_device": self.best.tokens_per_second_per_device,
                "mfu": self.best.mfu,
                "peak_memory_bytes": self.best.peak_memory,
                "device_hours_per_billion_tokens": self.device_hours,
            }
            row |= {"dollars_per_billion_tokens": self.device_hours * price} if price is not None else {}
            row |= {"worth_it": self.worth_it, "optimal": self.proven, "plan": plan_text(self.best)}
        return row


def sweep(
    model: Model,
    cluster: Cluster,
    batches: Sequence[int],
    seqs: Sequence[int] = (0,),
    nodes: Sequence[int] = (),
    *,
    runtime_name: str | Runtime = "meshwright",
    precision: str = "bf16",
    optimizer: str = "adamw",
    limits: Limits | None = None,
    time_limit: float = 10.0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Point]:
    """Plan every combination; `time_limit` is for each. Worthwhile points are marked.

    >>> import meshwright as mw
    >>> points = sweep(mw.Model.preset("gpt2-xl"), mw.Cluster.preset("8xa100-80gb"), [32, 64], [1024])
    >>> [(p.job.global_batch, p.best.fits, p.worth_it) for p in points]
    [(32, True, False), (64, True, True)]
    """
    framework = runtime(runtime_name) if isinstance(runtime_name, str) else runtime_name
    clusters = [on_nodes(cluster, count) for count in nodes] or [cluster]
    combinations = list(product(clusters, seqs, batches))
    # Every job is made before the first search, so that a mistake in the last combination shows at once.
    jobs = [Job(model, c, batch, seq, precision, optimizer) for c, seq, batch in combinations]
    questions = [Question(job, framework, limits or Limits(), time_limit) for job in jobs]
    points = [Point(job, _nodes(job), None, problem="interrupted") for job in jobs]
    try:
        for done, (i, point) in enumerate(in_parallel(_point, questions), 1):
            points[i] = point
            if progress:
                progress(done, len(jobs))
    except KeyboardInterrupt:
        if not any(point.best for point in points):
            raise
    return marked(points)


def _nodes(job: Job) -> int:
    return sum(group.nodes for group in job.cluster.groups)


def _point(question: Question) -> Point:
    started, job = time.monotonic(), question.job
    if found := question.answer():
        return Point(job, _nodes(job), found.estimate, found.proven)
    late = time.monotonic() - started >= question.seconds
    return Point(job, _nodes(job), None, problem=f"none found in {question.seconds:g} s" if late else "no plan fits")


def marked(points: Sequence[Point]) -> list[Point]:
    """Return points, with those on the front of throughput against cost marked."""

    def beaten(p: Point) -> bool:
        mine = (p.tokens_per_second, -p.device_hours)
        others = [(q.tokens_per_second, -q.device_hours) for q in points if q.best]
        return any(other != mine and other[0] >= mine[0] and other[1] >= mine[1] for other in others)

    return [replace(p, worth_it=p.best is not None and not beaten(p)) for p in points]


def on_nodes(cluster: Cluster, nodes: int) -> Cluster:
    """Return the cluster with another number of nodes, and a reference that a document can hold."""
    if len(cluster.groups) > 1:
        raise InputError("has several groups of nodes, of which none can be scaled alone", field="CLUSTER")
    group = cluster.groups[0]
    if group.nodes == nodes:
        return cluster
    name = f"{nodes}x{group.devices_per_node}x{group.device.name}"
    if isinstance(cluster.reference, Mapping):
        rows = [{**row, "nodes": nodes} for row in cluster.reference["group"]]
        return Cluster.from_table({**cluster.reference, "name": name, "group": rows})
    return Cluster.preset(name)
