"""Rules on choices other than the degrees: recompute, swap, precision, memory, compression."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import InputError
from meshwright.plans.rules.case import Broken, Case
from meshwright.plans.spans import layer_range

# Features a device needs for a precision; block-scaled 8-bit came with the 4-bit units.
_NATIVE = {"tf32": "tf32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "mxfp8": "fp4", "nvfp4": "fp4"}


def recompute(case: Case) -> Iterator[Broken]:
    """Check that operators named for recompute exist in the span."""
    for field, _, _, span in case.spans:
        if isinstance(span.recompute, str):
            continue
        known = sorted({name for layer in case.layers(span) for name in layer.op_names})
        for name in span.recompute:
            if name not in known:
                yield Broken(f"{field}.recompute", f"no layer of the span has an operator '{name}'", ", ".join(known))


def swaps(case: Case) -> Iterator[Broken]:
    """Check that swapped activations go to another stage on other devices."""
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


def precision_supported(case: Case) -> Iterator[Broken]:
    """Check that every device in use computes in the job's precision."""
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
    """Check that the memory of every device in use is known; without it the fit cannot be checked."""
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
    """Check that compression names layers of the model, each at most once."""
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
