"""meshwright: describe a model and a cluster, get the best way to train it, run it, watch it, keep it alive.

>>> import meshwright as mw
>>> job = mw.Job(mw.Model.preset("llama3-70b"), mw.Cluster.preset("8x8xh100"), global_batch=512, seq_len=8192)
>>> plan = mw.plan(job)
>>> plan.search["optimal"], mw.estimate(job, plan).fits
(True, True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any

from meshwright.base.version import RELEASE
from meshwright.errors import DoesNotFit, InputError, MeshwrightError, PlanError, UnknownName

__version__ = RELEASE

if TYPE_CHECKING:
    from meshwright.clusters import Cluster
    from meshwright.cost.estimate import Estimate
    from meshwright.frameworks.contract import Exported
    from meshwright.models import Layer, Model, Slice
    from meshwright.plans import Job, Plan, Schedule, Strategy
    from meshwright.traces.analysis import Analysis
    from meshwright.watcher.session import Watch

# Rooms, and the room of each noun: loaded when they are first asked for, since a question about a trace needs none of them.
ROOMS = ("clusters", "cost", "models", "plans")
NOUNS = {
    "Cluster": "clusters", "Job": "plans", "Layer": "models", "Model": "models", "Plan": "plans", "Schedule": "plans",
    "Slice": "models", "Strategy": "plans",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ROOMS:
        return import_module(f"meshwright.{name}")
    if name in NOUNS:
        return getattr(import_module(f"meshwright.{NOUNS[name]}"), name)
    raise AttributeError(f"module 'meshwright' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *ROOMS, *NOUNS})


def estimate(job: Job, plan: Plan | dict[str, Any], runtime: str = "meshwright") -> Estimate:
    """Step time, throughput, utilisation, memory and timeline of a plan, as a given framework would run it.

    >>> from meshwright import Cluster, Job, Model
    >>> job = Job(Model.preset("llama3-8b"), Cluster.preset("8xh100"), global_batch=64, seq_len=8192)
    >>> estimate(job, {"zero": 3}).fits
    True
    """
    from meshwright.cost.estimate import estimate as price  # numpy only when it is needed
    from meshwright.plans import Job, Plan

    if not isinstance(job, Job):
        raise InputError(f"is {type(job).__name__}, expected a Job", field="job")
    return price(job, plan if isinstance(plan, Plan) else Plan.of(plan, job), runtime)


def train(
    plan: Plan,
    data: str = "synthetic",
    *,
    steps: int,
    tell: Callable[[dict[str, Any]], None] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train under a plan on this machine, or as one of the processes that a launcher started; returns the run's events.

    `tell` gets every event as it happens. Options are those of `meshwright train`: lr, seed, output, resume, ...
    (`meshwright.run.options.Training`).

    >>> from meshwright import Cluster, Job, Model, Plan
    >>> job = Job(Model.preset("tiny-llama"), Cluster.preset("1xcpu"), 4, seq_len=32, precision="fp32")
    >>> events = train(Plan.of({"micro_batches": 2}, job), steps=2)
    >>> [event["step"] for event in events if event["event"] == "step"]
    [1, 2]
    """
    from meshwright.run.train import train as run  # torch only when it is needed

    return run(plan, data, steps=steps, tell=tell, **options)


def watch(
    targets: Any,
    *,
    attributes: Any = False,
    locals: Any = False,  # noqa: A002
    globals: Any = False,  # noqa: A002
    ranks: Iterable[int] | None = None,
    wrapper: Any = None,
    output: str | PathLike[str] | None = None,
) -> Watch:
    """Follow calls, exceptions and what changes inside targets: `with meshwright.watch("train:Trainer"): ...`

    Targets are 'pkg.module', 'pkg.module:Class', 'pkg.module:Class.method' or 'pkg.module:function', or the things
    themselves. `attributes`, `locals` and `globals` are True, or names with *; `wrapper` is 'plain', 'tensor', 'memory' or
    a class of your own. Each rank writes to `output`.rankN.jsonl; without an output, text goes to standard error.

    >>> import json, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with watch("json:dumps", output=os.path.join(folder, "run")):
    ...         text = json.dumps([1])
    ...     os.listdir(folder)
    ['run.rank0.jsonl']
    """
    from meshwright.watcher.session import Watch  # only when it is needed

    return Watch(
        targets, attributes=attributes, locals=locals, globals=globals, ranks=ranks, wrapper=wrapper, output=output
    )


def analyze(
    paths: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    plan: Plan | None = None,
    workers: int | None = None,
    ray: str | None = None,
    cache: bool = True,
    tell: Callable[[int, int], None] | None = None,
) -> Analysis:
    """Analyze profiler traces of a job: folders or files of `torch.profiler`, of any number of ranks.

    They are read by `workers` processes (one per core), or by the nodes of the cluster of Ray at an address. Columns are
    kept next to each trace as Parquet, unless `cache` is False. With a plan, what it promised stands beside what was
    seen. `tell` gets how many files are done, and of how many.

    >>> found = analyze("tests/data/traces/param/dlrm_8rank", cache=False)
    >>> len(found.ranks), found.ranks[3].device_name
    (8, 'Tesla V100-SXM2-32GB')
    """
    from meshwright.traces.analyze import analyze as look  # numpy only when it is needed

    return look(paths, plan=plan, workers=workers, ray=ray, cache=cache, tell=tell or (lambda done, of: None))


def plan(
    job: Job,
    runtime: str = "meshwright",
    *,
    fix: Mapping[str, Any] | None = None,
    forbid: Iterable[str] = (),
    time_limit: float | None = None,
    solver: str = "exact",
    headroom: float = 0.0,
) -> Plan:
    """Return the best plan for a job, with its proof in `search` and its cost in `estimate`."""
    from meshwright.plans import Job
    from meshwright.search.planner import plan as search  # numpy only when it is needed

    if not isinstance(job, Job):
        raise InputError(f"is {type(job).__name__}, expected a Job", field="job")
    return search(job, runtime, fix=fix, forbid=forbid, time_limit=time_limit, solver=solver, headroom=headroom).plan


def export(plan: Plan, name: str) -> Exported:
    """Return a plan in the words of a framework: `meshwright.export(plan, "megatron").files`."""
    from meshwright.frameworks.registry import export as write
    from meshwright.plans import Plan

    if not isinstance(plan, Plan):
        raise InputError(f"is {type(plan).__name__}, expected a Plan", field="plan")
    return write(plan.resolve(), plan, name)


__all__ = [
    "Cluster", "DoesNotFit", "InputError", "Job", "Layer", "MeshwrightError", "Model", "Plan", "PlanError", "Schedule",
    "Slice", "Strategy", "UnknownName", "__version__", "analyze", "estimate", "export", "plan", "train", "watch",
]  # fmt: skip
