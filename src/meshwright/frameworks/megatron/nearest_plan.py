"""Find the nearest plan that Megatron-LM runs; each change is reported in a line.

Limits are those of `validate_args` (megatron/training/arguments.py, commit 000c4ac24f) and of the configuration classes
of megatron-core 0.16.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from meshwright.frameworks.contract import Inexpressible
from meshwright.frameworks.shared.uniform_plan import Uniform
from meshwright.plans import Job
from meshwright.plans.schedule import Schedule
from meshwright.plans.strategy import Offload, Strategy

_SIXTEEN_OR_EIGHT = {"adamw-16bit", "adamw-8bit"}  # its precision-aware optimizer


@dataclass(frozen=True)
class Fit:
    """Uniform plan that is changed step by step into one that Megatron can express."""

    job: Job
    uniform: Uniform
    missing: list[str]

    def strategy(self, line: str, **changes: object) -> Fit:
        """Return the plan with another strategy, and report why."""
        self.missing.append(line)
        changed = msgspec.structs.replace(self.uniform.strategy, **changes)
        return replace(self, uniform=replace(self.uniform, strategy=changed))

    def overlap(self, line: str, **changes: object) -> Fit:
        self.missing.append(line)
        return replace(
            self, uniform=replace(self.uniform, overlap=msgspec.structs.replace(self.uniform.overlap, **changes))
        )


def fit(job: Job, uniform: Uniform, missing: list[str]) -> Uniform:
    """Return the plan that the arguments will express."""
    found = schedule(Fit(job, uniform, missing))
    for step in (_zero, _instances, _context, _experts, _offload, _overlap, _precision):
        found = step(found)
    return found.uniform


def schedule(found: Fit) -> Fit:
    """Choose 1F1B, or interleaved with at least as many micro-batches as device groups."""
    uniform = found.uniform
    if 0 in uniform.blocks[1:-1]:
        raise Inexpressible("a stage without a whole block: Megatron cuts pipelines between blocks")
    name, virtual = uniform.schedule.name, uniform.schedule.virtual
    if name not in {"1f1b", "interleaved"}:
        now = "interleaved" if virtual > 1 else "1f1b"
        found.missing.append(f"schedule: {name} is not there; {now} instead")
        uniform = replace(uniform, schedule=Schedule(name="interleaved" if virtual > 1 else "1f1b", virtual=virtual))
    if virtual > 1 and (uniform.groups == 1 or uniform.micro_batches < uniform.groups):
        groups = uniform.groups
        why = "has one device group" if groups == 1 else f"has {uniform.micro_batches} micro-batches"
        found.missing.append(f"schedule: interleaved takes {max(groups, 2)} or more, the plan {why}; 1f1b instead")
        each, extra = divmod(sum(uniform.blocks), groups)
        blocks = tuple(each + (1 if i < extra else 0) for i in range(groups))
        uniform = replace(uniform, schedule=Schedule(), blocks=blocks)
    return replace(found, uniform=uniform)


def _zero(found: Fit) -> Fit:
    strategy, groups = found.uniform.strategy, found.uniform.groups
    if strategy.zero >= 2 and groups > 1:
        found = found.strategy(f"zero: {strategy.zero} does not go with pipelines; 1 instead", zero=1)
    elif strategy.zero >= 2 and found.job.optimizer == "muon":
        found = found.strategy(f"zero: {strategy.zero} does not go with Muon; 1 instead", zero=1)
    if not found.uniform.strategy.zero and found.job.optimizer in _SIXTEEN_OR_EIGHT:
        found = found.strategy(f"zero: {found.job.optimizer} needs the distributed optimizer; 1 instead of 0", zero=1)
    return found


def _instances(found: Fit) -> Fit:
    """Fit the instances of the distributed optimizer: the experts' states are cut into as many copies."""
    strategy = found.uniform.strategy
    if not strategy.zero_group or strategy.zero_group == strategy.replicas:
        return found
    instances = strategy.replicas // strategy.zero_group
    if not any(layer.experts for layer in found.job.model.layers):
        return found
    if strategy.expert_replicas % instances:
        line = f"zero_group: {instances} copies do not divide {strategy.expert_replicas} replicas of experts; one copy"
        return found.strategy(line, zero_group=0)
    here, there = strategy.shards(strategy.expert_replicas), strategy.expert_replicas // instances
    if here != there:
        found.missing.append(f"zero_group: states of experts lie in {there} pieces instead of {here}")
    return found


def _context(found: Fit) -> Fit:
    """Fit context parallelism: all-to-all cuts whole key heads; every form cuts the sequence twice per device."""
    strategy, job = found.uniform.strategy, found.job
    kv_heads = min((layer.kv_heads for layer in job.model.layers if layer.kv_heads), default=1)
    if strategy.ulysses > 1 and kv_heads % (strategy.tp * strategy.ulysses):
        line = (
            f"ulysses: {strategy.ulysses} x tp {strategy.tp} does not divide the {kv_heads} key heads; a ring instead"
        )
        found = found.strategy(line, ulysses=1, ring=strategy.ring * strategy.ulysses)
        strategy = found.uniform.strategy
    pieces = 2 * strategy.ulysses * strategy.ring
    if pieces > 2 and job.seq_len % pieces:
        raise Inexpressible(
            f"Megatron cuts a sequence into {pieces} pieces, which does not divide {job.seq_len} tokens"
        )
    return found


def _experts(found: Fit) -> Fit:
    strategy = found.uniform.strategy
    if not any(layer.experts for layer in found.job.model.layers):
        return found
    if found.job.precision == "fp16" and strategy.ep > 1:
        raise Inexpressible("Megatron has no expert parallelism in fp16")
    if strategy.tp > 1 and not strategy.sp:
        pieces = msgspec.structs.replace(strategy, sp=True).sequence_pieces
        if found.job.seq_len % pieces:
            raise Inexpressible(
                f"experts under tp need sp, and {pieces} pieces do not divide {found.job.seq_len} tokens"
            )
        return found.strategy("sp: off does not go with experts under tp; on instead", sp=True)
    return found


def _overlap(found: Fit) -> Fit:
    overlap, strategy = found.uniform.overlap, found.uniform.strategy
    if strategy.zero and overlap.parameters and not overlap.gradients:
        found = found.overlap(
            "overlap: parameters are gathered ahead only where gradients overlap too", parameters=False
        )
    if found.uniform.schedule.virtual > 1 and not overlap.pipeline and found.uniform.groups == 2:
        found = found.overlap("overlap: two device groups that interleave always send ahead", pipeline=True)
    chunks = strategy.tp if strategy.sp else 1
    if overlap.tensor_chunks not in {1, chunks}:
        line = f"overlap: products of tensor parallelism are cut into {chunks} chunks or none; none"
        found = found.overlap(line, tensor_chunks=1)
    return found


def _offload(found: Fit) -> Fit:
    """Fit offload: any part of Adam's states, activations of whole blocks, no parameters.

    Activations are offloaded only without pipeline and recompute.
    """
    strategy, job = found.uniform.strategy, found.job
    wanted, kept = strategy.offload, strategy.offload
    if wanted.parameters:
        kept = msgspec.structs.replace(kept, parameters=0.0)
        found.missing.append("offload: parameters stay on their devices")
    if wanted.optimizer and not job.optimizer.startswith("adamw"):
        kept = msgspec.structs.replace(kept, optimizer=0.0)
        found.missing.append(f"offload: states of {job.optimizer} stay on their devices")
    blocks = len(job.model.blocks)
    if wanted.activations:
        layers = min(round(wanted.activations * blocks), blocks - 1)
        able = found.uniform.groups == 1 and strategy.recompute == "none"
        near = layers / blocks if able else 0.0
        if near != wanted.activations:
            kept = msgspec.structs.replace(kept, activations=near)
            where = f"those of {layers} of {blocks} blocks" if able else "none, beside pipelines or recomputation"
            found.missing.append(f"offload: activations of whole blocks only; {where}")
    if kept.optimizer and not strategy.zero:
        found = found.strategy("zero: states on the host need the distributed optimizer; 1 instead of 0", zero=1)
    changed: Strategy = msgspec.structs.replace(found.uniform.strategy, offload=Offload(**msgspec.structs.asdict(kept)))
    return replace(found, uniform=replace(found.uniform, strategy=changed))


def _precision(found: Fit) -> Fit:
    if found.job.precision == "tf32":
        found.missing.append("precision: no argument switches tf32 on; fp32, or PyTorch's own setting")
    return found
