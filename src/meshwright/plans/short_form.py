"""Short form of a plan: `{"tp": 4, "pp": 2, "dp": 8}` beside a job expands to the full document.

Each default costs nothing or is the usual choice:

- dp takes the devices the other degrees leave
- sequence parallelism goes with tensor parallelism
- ZeRO-1 goes with replicas (same traffic as plain data parallelism, less memory)
- micro-batches of one sample
- 1F1B, or its interleaved form with virtual stages
- blocks divided evenly over stages, the embedding with the first and the head with the last
"""

from __future__ import annotations

import re
from math import lcm
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from meshwright.base.tables import Table, convert
from meshwright.errors import InputError, PlanError, shorten
from meshwright.models import Model
from meshwright.plans.document import Backup, Compression, Overlap, Pipeline, Plan, Stage
from meshwright.plans.job import Job, WrittenJob
from meshwright.plans.schedule import V_SHAPED, Schedule, ScheduleName, group_of_stage, virtual_fault
from meshwright.plans.spans import device_ranks, device_text, layers_of, span_name
from meshwright.plans.strategy import Axis, Degree, Offload, Span, Strategy, Swap

T = TypeVar("T")


class ShortStrategy(Table, frozen=True, kw_only=True):
    """Degrees and choices, all of them optional."""

    dp: Degree | UnsetType = UNSET
    tp: Degree | UnsetType = UNSET
    sp: bool | UnsetType = UNSET
    ulysses: Degree | UnsetType = UNSET
    ring: Degree | UnsetType = UNSET
    ep: Degree | UnsetType = UNSET
    etp: Degree | UnsetType = UNSET
    zero: Literal[0, 1, 2, 3] | UnsetType = UNSET
    zero_group: Annotated[int, Meta(ge=0, le=1_000_000)] | UnsetType = UNSET
    recompute: Literal["none", "selective", "full"] | tuple[str, ...] | UnsetType = UNSET
    offload: Offload | UnsetType = UNSET
    order: tuple[Axis, ...] | UnsetType = UNSET


class ShortStage(ShortStrategy, frozen=True, kw_only=True):
    """One stage written by hand: what it leaves out comes from the plan around it."""

    layers: str | UnsetType = UNSET
    devices: str | UnsetType = UNSET
    shares: tuple[Annotated[int, Meta(ge=1)], ...] | UnsetType = UNSET
    swap: Swap | UnsetType = UNSET


class ShortPlan(ShortStrategy, frozen=True, kw_only=True):
    """A whole plan by hand: the job, the degrees, and only what differs from the defaults."""

    model: str | dict[str, Any] | UnsetType = UNSET
    cluster: str | dict[str, Any] | UnsetType = UNSET
    global_batch: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    seq_len: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    precision: str | UnsetType = UNSET
    optimizer: str | UnsetType = UNSET
    pp: Degree | UnsetType = UNSET
    virtual: Annotated[int, Meta(ge=1, le=1024)] | UnsetType = UNSET
    schedule: ScheduleName | UnsetType = UNSET
    micro_batch: Degree | UnsetType = UNSET
    micro_batches: Degree | UnsetType = UNSET
    stages: list[ShortStage] = []
    compression: tuple[Compression, ...] = ()
    backup: Backup | None = None
    overlap: Overlap = Overlap()
    schema: str = msgspec.field(default="", name="$schema")


_JOB_HINT = "model, cluster and global_batch in the plan, or --model, --cluster and --batch beside it"
_JOB_FIELDS = ("model", "cluster", "global_batch", "seq_len", "precision", "optimizer")


# Names in other frameworks.
_ELSEWHERE = {
    "cp": "ring=2 or ulysses=2, or both",
    "vpp": "virtual=2",
    "vp": "virtual=2",
    "fsdp": "zero=3",
    "mbs": "micro_batch=1",
    "gas": "micro_batches=8",
    "gbs": "--batch",
    "sequence_parallel": "sp=true",
}


def parse_short(text: str) -> dict[str, Any]:
    """Parse `tp=8,pp=4,recompute=selective` into the table of the short form.

    >>> parse_short("tp=8, pp=4, sp=false, recompute=norm+activation")
    {'tp': 8, 'pp': 4, 'sp': False, 'recompute': ['norm', 'activation']}
    """
    table: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not value:
            raise InputError(f"'{shorten(part)}' is not NAME=VALUE", valid="such as tp=8,pp=4,micro_batch=1")
        if name in _ELSEWHERE:
            raise InputError(f"unknown field '{name}'", field=name, valid=_ELSEWHERE[name])
        if re.search(r"[\s;]", value):
            raise InputError(f"'{shorten(value)}' is not one value: commas separate fields", field=name)
        if name in table:
            raise InputError(f"{name} is given twice: {table[name]} and {shorten(value)}", field=name)
        table[name] = _value(name, value)
    return table


def _value(name: str, text: str) -> Any:
    if re.fullmatch(r"-?[0-9]{1,30}", text):
        return int(text)
    if re.fullmatch(r"-?[0-9]+\.?[0-9]*([eE][+-]?[0-9]{1,3})?", text[:60]):
        return float(text[:60])  # no field takes a float; the error then names the valid type
    if text in {"true", "false"}:
        return text == "true"
    if name == "recompute" and text not in {"none", "selective", "full"}:
        return text.split("+")
    return text


def expand(table: dict[str, Any], job: Job | None = None, folder: str = "") -> tuple[Plan, Job]:
    """Return the full plan of a short one, and its job."""
    short = convert(table, ShortPlan)
    job = _job(short, job, folder)
    schedule = _schedule(short)
    groups = _group_count(short, schedule)
    names = _layers_of_stages(short, job.model, groups * schedule.virtual)
    for i, name in enumerate(names):
        _named(job.model, name, i)
    spans = [_span(short, job, i, groups, names) for i in range(groups * schedule.virtual)]
    devices = _devices(short, job, schedule, spans)
    stages = tuple(Stage(devices=d, spans=(s,)) for d, s in zip(devices, spans, strict=True))
    pipeline = Pipeline(
        batch=job.global_batch, micro_batches=_micro_batches(short, job, spans), stages=stages, schedule=schedule
    )
    plan = Plan(
        job=job.written(),
        pipelines=(pipeline,),
        compression=short.compression,
        backup=short.backup,
        overlap=short.overlap,
        schema=short.schema,
    )
    return plan, job


def _job(short: ShortPlan, job: Job | None, folder: str) -> Job:
    given = {name: getattr(short, name) for name in _JOB_FIELDS if getattr(short, name) is not UNSET}
    if job is not None:
        if given:
            name, value = next(iter(given.items()))
            raise InputError(f"is {shorten(repr(value), 40)} here, but the job is given beside the plan", field=name)
        return job
    for name in ("model", "cluster", "global_batch"):
        if name not in given:
            raise InputError("is required: a plan belongs to a job", field=name, valid=_JOB_HINT)
    return convert(given, WrittenJob).resolve(folder, "")


def _schedule(short: ShortPlan) -> Schedule:
    virtual = _or(short.virtual, 2 if short.schedule in V_SHAPED else 1)
    name: ScheduleName = _or(short.schedule, "interleaved" if virtual > 1 else "1f1b")
    if name == "custom":
        raise InputError("a custom schedule needs its table: write the full form", field="schedule")
    schedule = Schedule(name=name, virtual=virtual)
    if fault := virtual_fault(schedule):
        raise PlanError("schedule", fault[0], field="virtual", valid=fault[1])
    return schedule


def _group_count(short: ShortPlan, schedule: Schedule) -> int:
    """Return the device groups in the pipeline: `pp`, or the number of stages written out."""
    if not short.stages:
        return _or(short.pp, 1)
    written = len(short.stages)
    if written % schedule.virtual:
        raise InputError(f"has {written} stages, not a multiple of virtual {schedule.virtual}", field="stages")
    groups = written // schedule.virtual
    if _or(short.pp, groups) != groups:
        problem = f"is {short.pp}, but {written} stages are written out ({schedule.virtual} per device group)"
        raise InputError(problem, field="pp", valid=str(groups))
    return groups


def _layers_of_stages(short: ShortPlan, model: Model, stages: int) -> list[str]:
    """Return layers as written, or blocks divided evenly: earlier stages take one more when they do not divide."""
    if short.stages:
        written = [stage.layers for stage in short.stages]
        if all(isinstance(text, str) for text in written):
            return [str(text) for text in written]
        if any(isinstance(text, str) for text in written):
            missing = next(i for i, text in enumerate(written) if not isinstance(text, str))
            raise InputError("is required: the other stages name theirs", field=f"stages[{missing}].layers")
    return [span_name(model, part) for part in even_split(model, stages)]


def _named(model: Model, layers: str, index: int) -> None:
    """Refuse a span that names no layers, before it is used."""
    try:
        layers_of(model, layers)
    except InputError as error:
        raise PlanError("layer-names", error.problem, field=f"stages[{index}].layers", valid=error.valid) from None


def even_split(model: Model, stages: int) -> list[range]:
    """Divide whole blocks evenly; layers before the first block join the first part, later ones the last.

    >>> from meshwright.models import Model
    >>> even_split(Model.preset("tiny-llama"), 2)
    [range(0, 5), range(5, 11)]
    """
    starts = [i for i, layer in enumerate(model.layers) if layer.block and layer.opens_block]
    if not starts:
        starts = list(range(len(model.layers)))
    if stages > len(starts):
        problem = f"{stages} stages, but {model.name} has {len(starts)} blocks to deal out"
        raise PlanError("stages", problem, field="pp", valid=f"1 to {len(starts)}, or stages written out by layer")
    each, extra = divmod(len(starts), stages)
    cuts, taken = [0], 0
    for stage in range(stages - 1):
        taken += each + (1 if stage < extra else 0)
        cuts.append(starts[taken])
    return [range(a, b) for a, b in zip(cuts, [*cuts[1:], len(model.layers)], strict=True)]


def _span(short: ShortPlan, job: Job, index: int, groups: int, names: list[str]) -> Span:
    own = short.stages[index] if short.stages else ShortStage()

    def pick(name: str, default: Any) -> Any:
        return _or(getattr(own, name), _or(getattr(short, name, UNSET), default))

    tp, ulysses, ring = pick("tp", 1), pick("ulysses", 1), pick("ring", 1)
    dp = pick("dp", 0) or _remaining_dp(own, job, index, groups, tp * ulysses * ring)
    facts = {
        "layers": names[index], "dp": dp, "tp": tp, "ulysses": ulysses, "ring": ring,
        "ep": pick("ep", 1), "etp": pick("etp", 1),
        "zero": pick("zero", 1 if dp * ulysses * ring > 1 else 0), "zero_group": pick("zero_group", 0),
        "recompute": _recompute(pick("recompute", "none"), job.model, names[index]),
        "offload": msgspec.to_builtins(pick("offload", Offload())),
    }  # fmt: skip
    for name in ("order", "shares", "swap"):
        if value := pick(name, None):
            facts[name] = msgspec.to_builtins(value)
    cut = Strategy(tp=tp, ulysses=ulysses, ring=ring, sp=True)
    divides = job.seq_len % cut.sequence_pieces == 0 and not job.model.tokens
    facts["sp"] = pick("sp", tp > 1 and divides)
    return convert(facts, Span, prefix=f"stages[{index}]" if short.stages else "")


def _recompute(chosen: str | tuple[str, ...], model: Model, layers: str) -> str | list[str]:
    """Return the operators of the whole plan that occur in `layers`; unknown names stay, to be refused later."""
    if isinstance(chosen, str):
        return chosen
    everywhere = {name for layer in model.layers for name in layer.op_names}
    here = {name for layer in layers_of(model, layers) for name in layer.op_names}
    return [name for name in chosen if name in here or name not in everywhere] or "none"


def _remaining_dp(own: ShortStage, job: Job, index: int, groups: int, model_parallel: int) -> int:
    """Return the replicas that fill the devices of this stage, or of the whole cluster."""
    if isinstance(own.devices, str):
        devices, where = len(_ranks(own.devices, index)), f"the devices {own.devices} of the stage"
        per_replica = model_parallel
    else:
        devices, where = job.cluster.devices, f"the {job.cluster.devices} devices of {job.cluster.name}"
        per_replica = model_parallel * groups
    if per_replica > devices or devices % per_replica:
        problem = f"tp x ulysses x ring x pp = {per_replica} does not divide {where}"
        raise PlanError("degrees", problem, field="dp", valid="degrees that divide the devices, or dp written out")
    return devices // per_replica


def _ranks(text: str, index: int) -> tuple[int, ...]:
    try:
        return device_ranks(text)
    except InputError as error:
        raise error.at(field=f"stages[{index}].devices") from None


def _devices(short: ShortPlan, job: Job, schedule: Schedule, spans: list[Span]) -> list[str]:
    """Return devices as written; every other group takes the next free ones. Stages of one group share them."""
    written = _written_devices(short, job, schedule)
    groups = len(spans) // schedule.virtual
    taken = {rank for text in written.values() for rank in device_ranks(text)}
    free = [rank for rank in range(job.cluster.devices) if rank not in taken]
    needed = sum(spans[group].devices for group in range(groups) if group not in written)
    if needed > len(free):
        product = f"dp x tp x ulysses x ring over {groups} groups needs {needed + len(taken)} devices"
        problem = f"{product}, {job.cluster.name} has {job.cluster.devices}"
        raise PlanError("degrees", problem, field="dp", valid=f"degrees for {job.cluster.devices} devices at most")
    for group in range(groups):
        if group not in written:
            count = spans[group].devices
            written[group], free = device_text(free[:count]), free[count:]
    return [written[group_of_stage(schedule, len(spans), i)] for i in range(len(spans))]


def _written_devices(short: ShortPlan, job: Job, schedule: Schedule) -> dict[int, str]:
    """Return the devices that stages name, by group; two stages of one group must name the same."""
    written: dict[int, str] = {}
    for i, stage in enumerate(short.stages):
        if not isinstance(stage.devices, str):
            continue
        field, ranks = f"stages[{i}].devices", _ranks(stage.devices, i)
        if max(ranks) >= job.cluster.devices:
            problem = f"names device {max(ranks)}; {job.cluster.name} has {job.cluster.devices}"
            raise PlanError("device-sets", problem, field=field, valid=f"0 to {job.cluster.devices - 1}")
        group = group_of_stage(schedule, len(short.stages), i)
        if device_ranks(written.setdefault(group, stage.devices)) != ranks:
            problem = f"is {stage.devices}, but another stage of the same group is on {written[group]}"
            raise PlanError("device-sets", problem, field=field, valid=written[group])
    return written


def _micro_batches(short: ShortPlan, job: Job, spans: list[Span]) -> int:
    """Return the number of micro-batches from their size per replica, or as written; both must agree."""
    dp = lcm(*(span.dp for span in spans))  # stages may differ: a micro-batch must divide over all of them
    size = _or(short.micro_batch, 1)
    samples = size * dp
    count = _or(short.micro_batches, 0)
    if count and short.micro_batch is UNSET:
        return count
    if job.global_batch % samples:
        problem = f"global_batch {job.global_batch} is not a multiple of dp {dp} x micro_batch {size}"
        raise PlanError("batch", problem, field="global_batch", valid=f"a multiple of {samples}")
    if count and count != job.global_batch // samples:
        problem = f"micro_batches {count} contradicts micro_batch {size}, which makes {job.global_batch // samples}"
        raise PlanError("batch", problem, field="micro_batches", valid=str(job.global_batch // samples))
    return job.global_batch // samples


def _or(value: T | UnsetType, default: T) -> T:
    return default if isinstance(value, UnsetType) else value
