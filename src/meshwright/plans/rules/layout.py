"""Rules on layout: layers on stages, stages on devices, samples on replicas, stages in a schedule."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import InputError
from meshwright.plans.document import Pipeline
from meshwright.plans.rules.case import Broken, Case
from meshwright.plans.schedule import group_of_stage, table_faults, virtual_fault
from meshwright.plans.spans import layer_range
from meshwright.plans.strategy import DEFAULT_ORDER, Span


def layer_names(case: Case) -> Iterator[Broken]:
    """Check that every span names layers of the model."""
    for field, _, _, span in case.spans:
        try:
            case.layers(span)
        except InputError as error:
            yield Broken(f"{field}.layers", error.problem, error.valid)


def layer_cover(case: Case) -> Iterator[Broken]:
    """Check that every layer is in exactly one stage, in the model's order."""
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
    """Check that devices exist, and that two stages share all their devices (virtual stages) or none."""
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
    """Check that dp x tp x ulysses x ring is the number of devices of the stage."""
    for field, _, stage, span in case.spans:
        if span.devices != len(stage.ranks):
            product = f"dp {span.dp} x tp {span.tp} x ulysses {span.ulysses} x ring {span.ring} = {span.devices}"
            yield Broken(
                field, f"{product}, but the stage has {len(stage.ranks)} devices", f"a product of {len(stage.ranks)}"
            )


def axis_order(case: Case) -> Iterator[Broken]:
    """Check that `order` names each axis once."""
    for field, _, _, span in case.spans:
        if sorted(span.order) != sorted(DEFAULT_ORDER):
            yield Broken(
                f"{field}.order", f"{'-'.join(span.order)} does not name each axis once", "-".join(DEFAULT_ORDER)
            )


def schedule(case: Case) -> Iterator[Broken]:
    """Check that the schedule fits the number of stages per device group, and their order over the groups."""
    for p, pipeline in enumerate(case.plan.pipelines):
        yield from _schedule_shape(f"pipelines[{p}]", pipeline)


def _schedule_shape(place: str, pipeline: Pipeline) -> Iterator[Broken]:
    schedule, stages = pipeline.schedule, len(pipeline.stages)
    if fault := virtual_fault(schedule):
        yield Broken(f"{place}.schedule.virtual", *fault)
    elif bool(schedule.table) != (schedule.name == "custom"):
        yield Broken(f"{place}.schedule.table", "a table goes with the schedule custom, and only with it")
    elif stages % schedule.virtual:
        problem = f"{schedule.virtual} does not divide the {stages} stages"
        yield Broken(f"{place}.schedule.virtual", problem, f"a divisor of {stages}")
    else:
        yield from _schedule_groups(place, pipeline)


def _schedule_groups(place: str, pipeline: Pipeline) -> Iterator[Broken]:
    schedule, stages = pipeline.schedule, pipeline.stages
    groups = len(stages) // schedule.virtual
    found = len({stage.ranks for stage in stages})
    if found != groups:
        problem = f"{len(stages)} stages on {found} device groups, {schedule.virtual} per group asked for"
        yield Broken(f"{place}.schedule.virtual", problem)
        return
    for s, stage in enumerate(stages):
        expected = stages[group_of_stage(schedule, len(stages), s)]
        if stage.ranks != expected.ranks:
            problem = f"{schedule.name} runs stage {s} on devices {expected.devices}, not {stage.devices}"
            yield Broken(f"{place}.stages[{s}].devices", problem, expected.devices)
            return
    yield from _schedule_batches(place, pipeline, groups)


def _schedule_batches(place: str, pipeline: Pipeline, groups: int) -> Iterator[Broken]:
    """Check that the micro-batches fit the schedule: its rounds, its stages, or its table."""
    schedule, stages, count = pipeline.schedule, len(pipeline.stages), pipeline.micro_batches
    if schedule.name == "custom":
        for row, problem in table_faults(schedule, stages, count):
            yield Broken(f"{place}.schedule.table[{row}]", problem)
    elif schedule.name == "dualpipev" and count < stages:
        problem = f"dualpipev needs a micro-batch per stage: {count} for {stages}"
        yield Broken(f"{place}.micro_batches", problem, f"{stages} or more")
    elif schedule.name in {"interleaved", "zero-bubble"} and schedule.virtual > 1 and count % max(1, count // groups):
        problem = f"{count} micro-batches do not divide into {count // groups} rounds over {groups} device groups"
        yield Broken(f"{place}.micro_batches", problem, f"a multiple of {groups}")


def batch(case: Case) -> Iterator[Broken]:
    """Check that pipelines divide the global batch, micro-batches the pipeline's, replicas the micro-batch."""
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
