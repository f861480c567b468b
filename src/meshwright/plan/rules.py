"""The rules a plan must keep, one function each. A rule's name is the function's name with dashes.

A rule yields what breaks it; `check` raises the first. Rules run in order and each may rely on the
ones before it, so a plan is never measured against a layer or device that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from meshwright.errors import InputError, PlanError
from meshwright.model import Layer
from meshwright.plan.document import Pipeline, Plan, Stage
from meshwright.plan.job import Job
from meshwright.plan.schedule import V_SHAPED, group_of_stage, table_faults
from meshwright.plan.spans import layer_range, layers_of
from meshwright.plan.strategy import DEFAULT_ORDER, Span


@dataclass(frozen=True)
class Broken:
    """One violation: where, what, and what would be valid."""

    field: str
    problem: str
    valid: str = ""


@dataclass(frozen=True)
class Case:
    """A plan with its job found, and every span beside its place in the document."""

    plan: Plan
    job: Job

    @cached_property
    def stages(self) -> list[tuple[str, Pipeline, Stage]]:
        return [
            (f"pipelines[{p}].stages[{s}]", pipeline, stage)
            for p, pipeline in enumerate(self.plan.pipelines)
            for s, stage in enumerate(pipeline.stages)
        ]

    @cached_property
    def spans(self) -> list[tuple[str, Pipeline, Stage, Span]]:
        return [
            (f"{field}.spans[{i}]", pipeline, stage, span)
            for field, pipeline, stage in self.stages
            for i, span in enumerate(stage.spans)
        ]

    def layers(self, span: Span) -> tuple[Layer, ...]:
        return layers_of(self.job.model, span.layers)


def check(plan: Plan, job: Job) -> None:
    """Raise the first broken rule as a `PlanError`."""
    case = Case(plan, job)
    for rule in RULES:
        for broken in rule(case):
            raise PlanError(rule_name(rule), broken.problem, field=broken.field, valid=broken.valid)


def rule_name(rule: Callable[[Case], Iterator[Broken]]) -> str:
    return rule.__name__.replace("_", "-")


def layer_names(case: Case) -> Iterator[Broken]:
    """Every span names layers the model has."""
    for field, _, _, span in case.spans:
        try:
            case.layers(span)
        except InputError as error:
            yield Broken(f"{field}.layers", error.problem, error.valid)


def layer_cover(case: Case) -> Iterator[Broken]:
    """Every layer is in exactly one stage, in the model's order."""
    layers = case.job.model.layers
    for p, pipeline in enumerate(case.plan.pipelines):
        following = 0
        for s, stage in enumerate(pipeline.stages):
            for i, span in enumerate(stage.spans):
                found = layer_range(case.job.model, span.layers)
                field = f"pipelines[{p}].stages[{s}].spans[{i}].layers"
                if found.start > following:
                    lost = layers[following].name
                    yield Broken(
                        field, f"begins at {layers[found.start].name}; {lost} is in no stage", f"to begin at {lost}"
                    )
                elif found.start < following:
                    yield Broken(field, f"begins at {layers[found.start].name}, which an earlier span already has")
                following = max(following, found.stop)
        if following < len(layers):
            last = f"pipelines[{p}].stages[{len(pipeline.stages) - 1}].spans"
            yield Broken(
                last, f"ends before {layers[following].name}, which is in no stage", f"to end at {layers[-1].name}"
            )


def device_sets(case: Case) -> Iterator[Broken]:
    """Devices exist, and two stages share either all their devices (virtual stages) or none."""
    total = case.job.cluster.devices
    sets: dict[tuple[int, ...], int] = {}  # each set of devices once, so that stages compare by number
    owners: dict[int, tuple[str, str, int, int]] = {}
    for p, pipeline in enumerate(case.plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            field = f"pipelines[{p}].stages[{s}].devices"
            try:
                ranks = stage.ranks
            except InputError as error:
                yield Broken(field, error.problem, error.valid)
                continue
            if max(ranks) >= total:
                problem = f"names device {max(ranks)}; {case.job.cluster.name} has {total}"
                yield Broken(field, problem, f"0 to {total - 1}")
                continue
            mine = (field, stage.devices, sets.setdefault(ranks, len(sets)), p)
            clash = next((rank for rank in ranks if owners.setdefault(rank, mine)[2:] != mine[2:]), None)
            if clash is not None:
                where, devices = owners[clash][:2]
                problem = f"device {clash} is also in {where} ({devices})"
                yield Broken(field, problem, f"{devices}, or devices of its own")


def degrees(case: Case) -> Iterator[Broken]:
    """dp x tp x ulysses x ring is the number of devices of the stage."""
    for field, _, stage, span in case.spans:
        if span.devices != len(stage.ranks):
            product = f"dp {span.dp} x tp {span.tp} x ulysses {span.ulysses} x ring {span.ring} = {span.devices}"
            yield Broken(
                field, f"{product}, but the stage has {len(stage.ranks)} devices", f"a product of {len(stage.ranks)}"
            )


def axis_order(case: Case) -> Iterator[Broken]:
    """`order` names each axis once."""
    for field, _, _, span in case.spans:
        if sorted(span.order) != sorted(DEFAULT_ORDER):
            yield Broken(
                f"{field}.order", f"{'-'.join(span.order)} does not name each axis once", "-".join(DEFAULT_ORDER)
            )


def batch(case: Case) -> Iterator[Broken]:
    """Pipelines share out the global batch, micro-batches the pipeline's, replicas the micro-batch."""
    total = sum(pipeline.batch for pipeline in case.plan.pipelines)
    if total != case.job.global_batch:
        problem = f"the pipelines train on {total} samples, the job has {case.job.global_batch}"
        yield Broken("pipelines", problem, f"batches that sum to {case.job.global_batch}")
    for p, pipeline in enumerate(case.plan.pipelines):
        if pipeline.batch % pipeline.micro_batches:
            problem = f"{pipeline.micro_batches} does not divide the batch of {pipeline.batch}"
            yield Broken(f"pipelines[{p}].micro_batches", problem, f"a divisor of {pipeline.batch}")
    for field, pipeline, _, span in case.spans:
        if pipeline.batch % pipeline.micro_batches == 0:
            yield from _shares(field, pipeline.samples, span)


def _shares(field: str, samples: int, span: Span) -> Iterator[Broken]:
    if span.shares:
        if len(span.shares) != span.dp or sum(span.shares) != samples:
            given = f"{len(span.shares)} shares of {sum(span.shares)} samples"
            problem = f"{given} for dp {span.dp} and micro-batches of {samples}"
            yield Broken(f"{field}.shares", problem, f"{span.dp} numbers that sum to {samples}")
    elif samples % span.dp:
        problem = f"dp {span.dp} does not divide a micro-batch of {samples} samples"
        yield Broken(f"{field}.dp", problem, f"a divisor of {samples}, or shares")


def tensor_parallel(case: Case) -> Iterator[Broken]:
    """Layers that came without known operators run whole: no tensor or sequence cut."""
    for field, _, _, span in case.spans:
        if span.tp * span.ulysses * span.ring == 1:
            continue
        for layer in case.layers(span):
            if not layer.tensor_parallel:
                problem = f"{layer.name} was traced from a module and cannot be cut by tp, ulysses or ring"
                yield Broken(field, problem, "tp, ulysses and ring of 1")
                break


def heads(case: Case) -> Iterator[Broken]:
    """tp x ulysses divides the attention heads, and divides or is divided by the key/value heads."""
    for field, _, _, span in case.spans:
        cut = span.tp * span.ulysses
        for layer in case.layers(span):
            if not layer.heads:
                continue
            if layer.heads % cut:
                product = f"tp {span.tp} x ulysses {span.ulysses} = {cut}"
                problem = f"{product} does not divide the {layer.heads} heads of {layer.name}"
                yield Broken(field, problem, f"a divisor of {layer.heads}")
                break
            if layer.kv_heads % cut and cut % layer.kv_heads:
                problem = f"tp x ulysses = {cut} does not fit the {layer.kv_heads} key/value heads of {layer.name}"
                yield Broken(field, problem, f"a divisor or a multiple of {layer.kv_heads}")
                break


def widths(case: Case) -> Iterator[Broken]:
    """tp divides the width of every feed-forward layer, etp that of every expert."""
    for field, _, _, span in case.spans:
        for layer in case.layers(span):
            if broken := _width(field, span, layer):
                yield broken
                break


def _width(field: str, span: Span, layer: Layer) -> Broken | None:
    for op in layer.ops:
        if op.name in {"down", "shared_down"} and op.k % span.tp:
            return Broken(
                f"{field}.tp", f"{span.tp} does not divide the width {op.k} of {layer.name}", f"a divisor of {op.k}"
            )
        if op.name == "expert_down" and op.k % span.etp:
            problem = f"{span.etp} does not divide the expert width {op.k} of {layer.name}"
            return Broken(f"{field}.etp", problem, f"a divisor of {op.k}")
    return None


def experts(case: Case) -> Iterator[Broken]:
    """ep divides the experts, and the expert grid folds onto the stage's devices."""
    has_experts = any(layer.experts for layer in case.job.model.layers)
    for field, _, _, span in case.spans:
        if span.ep * span.etp > 1 and not has_experts:
            name = "ep" if span.ep > 1 else "etp"
            yield Broken(f"{field}.{name}", f"is {getattr(span, name)}; {case.job.model.name} has no experts", "1")
            continue
        for layer in case.layers(span):
            if layer.experts and layer.experts % span.ep:
                problem = f"{span.ep} does not divide the {layer.experts} experts of {layer.name}"
                yield Broken(f"{field}.ep", problem, f"a divisor of {layer.experts}")
                break
        if span.devices % (span.ep * span.etp):
            problem = f"ep {span.ep} x etp {span.etp} does not divide the {span.devices} devices of the stage"
            yield Broken(f"{field}.{'ep' if span.ep > 1 else 'etp'}", problem, f"a product that divides {span.devices}")


def sequence(case: Case) -> Iterator[Broken]:
    """The sequence divides by everything that cuts it; a ring needs two pieces per device to balance a causal mask."""
    for field, _, _, span in case.spans:
        if span.sp and span.tp == 1:
            yield Broken(f"{field}.sp", "sequence parallelism needs tensor parallelism", "false, or tp above 1")
            continue
        cut = span.sequence_pieces
        lengths = {layer.length(case.job.seq_len) for layer in case.layers(span)}
        bad = sorted(length for length in lengths if length % cut)
        if bad:
            parts = f"ulysses {span.ulysses} x ring {span.ring}" + (f" x tp {span.tp} (sp)" if span.sp else "")
            yield Broken(field, f"{parts} cuts the sequence into {cut} pieces, which does not divide {bad[0]} tokens")


def zero_groups(case: Case) -> Iterator[Broken]:
    """A ZeRO group is a part of the replicas, and only ZeRO has one."""
    for field, _, _, span in case.spans:
        if span.zero_group and not span.zero:
            yield Broken(f"{field}.zero_group", "is set, but zero is 0", "0, or a zero level of 1 to 3")
        elif span.zero_group and span.replicas % span.zero_group:
            problem = f"{span.zero_group} does not divide the {span.replicas} replicas (dp x ulysses x ring)"
            yield Broken(f"{field}.zero_group", problem, f"a divisor of {span.replicas}")
        elif span.zero_group and any(layer.experts for layer in case.layers(span)):
            small, large = sorted((span.zero_group, span.expert_replicas))
            if large % small:
                problem = f"{span.zero_group} does not fit the {span.expert_replicas} replicas of the experts"
                yield Broken(f"{field}.zero_group", problem, f"a divisor or a multiple of {span.expert_replicas}")


def recompute(case: Case) -> Iterator[Broken]:
    """Operators named for recomputation exist in the span."""
    for field, _, _, span in case.spans:
        if isinstance(span.recompute, str):
            continue
        known = sorted({name for layer in case.layers(span) for name in layer.op_names})
        for name in span.recompute:
            if name not in known:
                yield Broken(f"{field}.recompute", f"no layer of the span has an operator '{name}'", ", ".join(known))


def swaps(case: Case) -> Iterator[Broken]:
    """Swapped activations go to another stage on other devices."""
    for field, pipeline, stage, span in case.spans:
        if span.swap is None:
            continue
        stages = pipeline.stages
        if span.swap.activations + span.offload.activations > 1:
            problem = f"swaps {span.swap.activations:g} and offloads {span.offload.activations:g} of the activations"
            yield Broken(f"{field}.swap.activations", problem, "fractions that sum to 1 at most")
        elif span.swap.to >= len(stages) or stages[span.swap.to].ranks == stage.ranks:
            problem = f"stage {span.swap.to} is not another stage on other devices"
            yield Broken(f"{field}.swap.to", problem, f"0 to {len(stages) - 1}, on other devices than {stage.devices}")


def schedule(case: Case) -> Iterator[Broken]:
    """The schedule fits the stages: how many there are per device group, and in which order they visit the groups."""
    for p, pipeline in enumerate(case.plan.pipelines):
        yield from _schedule_shape(f"pipelines[{p}].schedule", pipeline)


def _schedule_shape(field: str, pipeline: Pipeline) -> Iterator[Broken]:
    name, virtual, stages = pipeline.schedule.name, pipeline.schedule.virtual, len(pipeline.stages)
    if name in V_SHAPED and virtual != 2:
        yield Broken(f"{field}.virtual", f"{name} runs two stages per device group, not {virtual}", "2")
    elif name in {"gpipe", "1f1b"} and virtual != 1:
        yield Broken(f"{field}.virtual", f"{name} runs one stage per device group, not {virtual}", "1, or interleaved")
    elif name == "interleaved" and virtual < 2:
        yield Broken(f"{field}.virtual", "interleaved needs two or more stages per device group", "2 or more, or 1f1b")
    elif bool(pipeline.schedule.table) != (name == "custom"):
        yield Broken(f"{field}.table", "a table goes with the schedule custom, and only with it")
    elif stages % virtual:
        yield Broken(f"{field}.virtual", f"{virtual} does not divide the {stages} stages", f"a divisor of {stages}")
    else:
        yield from _schedule_groups(field, pipeline)


def _schedule_groups(field: str, pipeline: Pipeline) -> Iterator[Broken]:
    schedule, stages = pipeline.schedule, pipeline.stages
    groups = len(stages) // schedule.virtual
    found = len({stage.ranks for stage in stages})
    if found != groups:
        yield Broken(
            f"{field}.virtual", f"{len(stages)} stages on {found} device groups, {schedule.virtual} per group asked for"
        )
        return
    for s, stage in enumerate(stages):
        expected = stages[group_of_stage(schedule, len(stages), s)]
        if stage.ranks != expected.ranks:
            problem = f"{schedule.name} runs stage {s} on devices {expected.devices}, not {stage.devices}"
            yield Broken(field.replace("schedule", f"stages[{s}].devices"), problem, expected.devices)
            return
    if schedule.name == "custom":
        for row, problem in table_faults(schedule, len(stages), pipeline.micro_batches):
            yield Broken(f"{field}.table[{row}]", problem)
        return
    if schedule.name == "dualpipev" and pipeline.micro_batches < len(stages):
        problem = f"dualpipev needs a micro-batch per stage: {pipeline.micro_batches} for {len(stages)}"
        yield Broken(field.replace("schedule", "micro_batches"), problem, f"{len(stages)} or more")
    rounds = max(1, pipeline.micro_batches // groups)
    if schedule.name in {"interleaved", "zero-bubble"} and schedule.virtual > 1 and pipeline.micro_batches % rounds:
        problem = (
            f"{pipeline.micro_batches} micro-batches do not divide into {rounds} rounds over {groups} device groups"
        )
        yield Broken(field.replace("schedule", "micro_batches"), problem, f"a multiple of {groups}")


# What a device must have to compute in a precision; block-scaled 8-bit came with the 4-bit units.
_NATIVE = {"tf32": "tf32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "mxfp8": "fp4", "nvfp4": "fp4"}


def precision_supported(case: Case) -> Iterator[Broken]:
    """Every device in use computes in the job's precision."""
    wanted = case.job.precision
    for _, _, stage in case.stages:
        for device in case.job.cluster.kinds(stage.ranks):
            native = _NATIVE.get(wanted)
            missing = (native and native not in device.flops) or (wanted == "nvfp4" and device.vendor != "nvidia")
            if missing:
                valid = ["fp32", *(p for p in ("tf32", "bf16", "fp16", "fp8") if p in device.flops)]
                problem = f"{device.name} (devices {stage.devices}) does not compute in {wanted}"
                yield Broken("job.precision", problem, ", ".join(valid))
                return


def memory_known(case: Case) -> Iterator[Broken]:
    """The memory of every device in use is known, so that a plan can be told to fit."""
    for field, _, stage in case.stages:
        for device in case.job.cluster.kinds(stage.ranks):
            if device.memory <= 0:
                yield Broken(f"{field}.devices", f"the memory of {device.name} is not known")
                return
    hosts = case.job.cluster.groups
    for field, _, stage, span in case.spans:
        away = span.offload.activations + span.offload.optimizer + span.offload.parameters
        if away and any(
            hosts[case.job.cluster.group_index(rank)].host_memory <= 0
            for rank in stage.ranks[:: max(len(stage.ranks) - 1, 1)]
        ):
            yield Broken(
                f"{field}.offload", "the memory of the host is not known", "host_memory_gib in the cluster's file"
            )
            return


def compressed_layers(case: Case) -> Iterator[Broken]:
    """Compression names layers the model has, each at most once."""
    taken: dict[int, int] = {}
    for i, rule in enumerate(case.plan.compression):
        try:
            found = layer_range(case.job.model, rule.layers)
        except InputError as error:
            yield Broken(f"compression[{i}].layers", error.problem, error.valid)
            continue
        for index in found:
            if taken.setdefault(index, i) != i:
                name = case.job.model.layers[index].name
                yield Broken(f"compression[{i}].layers", f"{name} is already in compression[{taken[index]}]")
                break


RULES: tuple[Callable[[Case], Iterator[Broken]], ...] = (
    layer_names, layer_cover, device_sets, degrees, axis_order, schedule, batch, tensor_parallel, heads, widths, experts,
    sequence, zero_groups, recompute, swaps, precision_supported, memory_known, compressed_layers,
)  # fmt: skip
