"""Find the nearest plan that Megatron-LM runs; each change is reported in a line.

Limits are those of `validate_args` (megatron/training/arguments.py, commit 000c4ac24f) and of the configuration classes
of megatron-core 0.16.1.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as changed

from meshwright.frameworks.contract import Inexpressible
from meshwright.frameworks.shared.nearest_plan import Draft
from meshwright.frameworks.shared.uniform_plan import Uniform
from meshwright.plans import Job
from meshwright.plans.schedule import Schedule, ScheduleName

_SIXTEEN_OR_EIGHT = {"adamw-16bit", "adamw-8bit"}  # its precision-aware optimizer


def fit(job: Job, uniform: Uniform, missing: list[str]) -> Uniform:
    """Return the plan that the arguments will express."""
    draft = Draft(job, uniform, missing)
    for step in (schedule, _zero, _instances, _context, _experts, _offload, _overlap, _precision):
        step(draft)
    return draft.uniform


def schedule(draft: Draft) -> None:
    """1F1B, or interleaved with at least as many micro-batches as device groups."""
    uniform = draft.uniform
    if 0 in uniform.blocks[1:-1]:
        raise Inexpressible("a stage without a whole block: Megatron cuts pipelines between blocks")
    name, virtual = uniform.schedule.name, uniform.schedule.virtual
    if name not in {"1f1b", "interleaved"}:
        now: ScheduleName = "interleaved" if virtual > 1 else "1f1b"
        draft.missing.append(f"schedule: {name} is not there; {now} instead")
        draft.uniform = replace(uniform, schedule=Schedule(name=now, virtual=virtual))
    if virtual > 1 and (uniform.groups == 1 or uniform.micro_batches < uniform.groups):
        groups = uniform.groups
        why = "has one device group" if groups == 1 else f"has {uniform.micro_batches} micro-batches"
        draft.missing.append(f"schedule: interleaved takes {max(groups, 2)} or more, the plan {why}; 1f1b instead")
        draft.dealt_evenly()


def _zero(draft: Draft) -> None:
    strategy, groups = draft.uniform.strategy, draft.uniform.groups
    if strategy.zero >= 2 and groups > 1:
        draft.say(f"zero: {strategy.zero} does not go with pipelines; 1 instead", zero=1)
    elif strategy.zero >= 2 and draft.job.optimizer == "muon":
        draft.say(f"zero: {strategy.zero} does not go with Muon; 1 instead", zero=1)
    if not draft.uniform.strategy.zero and draft.job.optimizer in _SIXTEEN_OR_EIGHT:
        draft.say(f"zero: {draft.job.optimizer} needs the distributed optimizer; 1 instead of 0", zero=1)


def _instances(draft: Draft) -> None:
    """Copies of the distributed optimizer; the experts' states are cut into as many copies."""
    strategy = draft.uniform.strategy
    if not strategy.zero_group or strategy.zero_group == strategy.replicas:
        return
    instances = strategy.replicas // strategy.zero_group
    if not any(layer.experts for layer in draft.job.model.layers):
        return
    if strategy.expert_replicas % instances:
        line = f"zero_group: {instances} copies do not divide {strategy.expert_replicas} replicas of experts; one copy"
        draft.say(line, zero_group=0)
        return
    here, there = strategy.shards(strategy.expert_replicas), strategy.expert_replicas // instances
    if here != there:
        draft.missing.append(f"zero_group: states of experts lie in {there} pieces instead of {here}")


def _context(draft: Draft) -> None:
    """All-to-all cuts whole key heads; every form cuts the sequence twice per device."""
    strategy, job = draft.uniform.strategy, draft.job
    kv_heads = min((layer.kv_heads for layer in job.model.layers if layer.kv_heads), default=1)
    if strategy.ulysses > 1 and kv_heads % (strategy.tp * strategy.ulysses):
        line = (
            f"ulysses: {strategy.ulysses} x tp {strategy.tp} does not divide the {kv_heads} key heads; a ring instead"
        )
        draft.say(line, ulysses=1, ring=strategy.ring * strategy.ulysses)
        strategy = draft.uniform.strategy
    pieces = 2 * strategy.ulysses * strategy.ring
    if pieces > 2 and job.seq_len % pieces:
        raise Inexpressible(
            f"Megatron cuts a sequence into {pieces} pieces, which does not divide {job.seq_len} tokens"
        )


def _experts(draft: Draft) -> None:
    strategy = draft.uniform.strategy
    if not any(layer.experts for layer in draft.job.model.layers):
        return
    if draft.job.precision == "fp16" and strategy.ep > 1:
        raise Inexpressible("Megatron has no expert parallelism in fp16")
    if strategy.tp > 1 and not strategy.sp:
        pieces = changed(strategy, sp=True).sequence_pieces
        if draft.job.seq_len % pieces:
            raise Inexpressible(
                f"experts under tp need sp, and {pieces} pieces do not divide {draft.job.seq_len} tokens"
            )
        draft.say("sp: off does not go with experts under tp; on instead", sp=True)


def _overlap(draft: Draft) -> None:
    overlap, strategy = draft.uniform.overlap, draft.uniform.strategy
    if strategy.zero and overlap.parameters and not overlap.gradients:
        line = "overlap: parameters are gathered ahead only where gradients overlap too"
        draft.only_overlap(changed(overlap, parameters=False), line)
    if draft.uniform.schedule.virtual > 1 and not overlap.pipeline and draft.uniform.groups == 2:
        line = "overlap: two device groups that interleave always send ahead"
        draft.only_overlap(changed(draft.uniform.overlap, pipeline=True), line)
    chunks = strategy.tp if strategy.sp else 1
    if overlap.tensor_chunks not in {1, chunks}:
        line = f"overlap: products of tensor parallelism are cut into {chunks} chunks or none; none"
        draft.only_overlap(changed(draft.uniform.overlap, tensor_chunks=1), line)


def _offload(draft: Draft) -> None:
    """States of Adam in any part, activations of whole blocks without pipeline or recomputation, no parameters."""
    strategy, job = draft.uniform.strategy, draft.job
    wanted, kept = strategy.offload, strategy.offload
    if wanted.parameters:
        kept = changed(kept, parameters=0.0)
        draft.missing.append("offload: parameters stay on their devices")
    if wanted.optimizer and not job.optimizer.startswith("adamw"):
        kept = changed(kept, optimizer=0.0)
        draft.missing.append(f"offload: states of {job.optimizer} stay on their devices")
    blocks = len(job.model.blocks)
    if wanted.activations:
        layers = min(round(wanted.activations * blocks), blocks - 1)
        able = draft.uniform.groups == 1 and strategy.recompute == "none"
        near = layers / blocks if able else 0.0
        if near != wanted.activations:
            kept = changed(kept, activations=near)
            where = f"those of {layers} of {blocks} blocks" if able else "none, beside pipelines or recomputation"
            draft.missing.append(f"offload: activations of whole blocks only; {where}")
    if kept.optimizer and not strategy.zero:
        draft.say("zero: states on the host need the distributed optimizer; 1 instead of 0", zero=1)
    draft.set(offload=kept)


def _precision(draft: Draft) -> None:
    if draft.job.precision == "tf32":
        draft.missing.append("precision: no argument switches tf32 on; fp32, or PyTorch's own setting")
