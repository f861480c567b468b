"""Replace choices that a framework cannot express by the nearest it can, and report each in a line."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

from msgspec.structs import replace as changed

from meshwright.errors import InputError
from meshwright.frameworks.contract import Inexpressible
from meshwright.frameworks.shared.uniform_plan import Uniform, dealt, plan_of, settle
from meshwright.plans import Job, Plan
from meshwright.plans.document import Overlap, Pipeline
from meshwright.plans.schedule import Schedule, group_of_stage
from meshwright.plans.strategy import Offload

_AXES = {"tp": "tensor parallelism", "ulysses": "Ulysses", "ring": "ring attention", "pp": "pipeline"}


@dataclass
class Draft:
    """Plan that is fitted to a framework, and its losses so far."""

    job: Job
    uniform: Uniform
    missing: list[str] = field(default_factory=list)

    @staticmethod
    def of(job: Job, plan: Plan) -> Draft:
        """Return a draft of the nearest plan that cuts every layer equally."""
        uniform, missing = settle(job, plan)
        draft = Draft(job, uniform, list(missing))
        if not in_order(plan.pipelines[0]):
            draft.missing.append("devices: groups of stages stand on the cluster's devices in order")
        return draft

    def say(self, line: str, **changes: Any) -> None:
        """Set other degrees, and report why."""
        self.missing.append(line)
        self.set(**changes)

    def set(self, **changes: Any) -> None:
        self.uniform = replace(self.uniform, strategy=changed(self.uniform.strategy, **changes))

    def plan(self) -> Plan:
        """Return the plan that the files mean."""
        try:
            return plan_of(self.job, self.uniform)
        except InputError as error:
            raise Inexpressible(f"the nearest plan that can be said breaks a rule: {error}") from None

    def without_experts(self) -> None:
        """Drop expert parallelism."""
        if self.uniform.strategy.ep > 1 or self.uniform.strategy.etp > 1:
            self.say("ep: experts are sharded with the rest of the model", ep=1, etp=1)

    def without_sp(self, why: str) -> None:
        """Drop the choice of sequence parallelism."""
        if self.uniform.strategy.sp:
            self.say(f"sp: {why}", sp=False)

    def without(self, *axes: str, where: str = "here") -> None:
        """Turn devices along axes that the framework lacks into replicas of the model."""
        strategy = self.uniform.strategy
        degrees = {"tp": strategy.tp, "ulysses": strategy.ulysses, "ring": strategy.ring, "pp": self.uniform.groups}
        for axis in axes:
            if degrees[axis] > 1:
                words = f"{axis}={degrees[axis]}: no {_AXES[axis]} {where}; these devices are replicas instead"
                self._replicate(axis, degrees[axis], 1, words)

    def whole_heads(self) -> None:
        """Reduce tensor parallelism to whole key/value heads, for a framework that does not replicate them."""
        heads = gcd(*(layer.kv_heads for layer in self.job.model.layers if layer.kv_heads))
        tp = self.uniform.strategy.tp
        if heads and heads % tp:
            fits = gcd(heads, tp)
            words = f"tp={tp}: has to divide the {heads} key/value heads; tp={fits}, and more replicas"
            self._replicate("tp", tp, fits, words)

    def _replicate(self, axis: str, degree: int, left: int, words: str) -> None:
        """Turn part of the devices along an axis into data-parallel replicas."""
        strategy, micro_batch = self.uniform.strategy, self.uniform.micro_batch(self.job)
        self.missing.append(words)
        dp = strategy.dp * (degree // left)
        if axis == "pp":
            self.uniform = replace(self.uniform, blocks=(sum(self.uniform.blocks),), schedule=Schedule())
        else:
            self.set(**{axis: left}, sp=strategy.sp and (axis, left) != ("tp", 1))
        if not strategy.zero:
            self.missing.append("zero=0: ZeRO-1 instead, as there are more replicas, of more of the model")
        self.set(dp=dp, zero=strategy.zero or 1)
        self._batch(dp, micro_batch)

    def _batch(self, dp: int, micro_batch: int) -> None:
        """Set as many samples at a time as before, or the most below that divide a replica's part of the batch."""
        if self.job.global_batch % dp:
            raise Inexpressible(f"a batch of {self.job.global_batch} does not divide over {dp} replicas")
        own = self.job.global_batch // dp
        size = next(n for n in range(min(micro_batch, own), 0, -1) if own % n == 0)
        self.uniform = replace(self.uniform, micro_batches=own // size)

    def only_zero(self, levels: Collection[int]) -> None:
        """Choose the next higher known ZeRO level for an unknown one, else the highest."""
        zero = self.uniform.strategy.zero
        if zero in levels:
            return
        instead = min((level for level in levels if level > zero), default=max(levels))
        self.say(
            f"zero={zero}: ZeRO-{instead} instead" if instead else f"zero={zero}: nothing is sharded", zero=instead
        )

    def only_recompute(self, levels: Collection[str]) -> None:
        """Choose the least that recomputes all of an unknown choice, so that the plan still fits."""
        chosen = self.uniform.strategy.recompute
        if chosen in levels:
            return
        cheap = {name for layer in self.job.model.layers for name in layer.recomputed_ops("selective")}
        if "selective" in levels and set(chosen) <= cheap:
            self.say(
                f"recompute={'+'.join(chosen)}: all cheap operators are repeated (selective)", recompute="selective"
            )
        else:
            text = chosen if isinstance(chosen, str) else "+".join(chosen)
            self.say(f"recompute={text}: whole blocks are repeated (full)", recompute="full")

    def only_offload(self, *known: str) -> None:
        """Offload all of a kind of tensor, or none of it."""
        offload = self.uniform.strategy.offload
        said = {}
        for name in ("activations", "optimizer", "parameters"):
            part = getattr(offload, name)
            said[name] = 1.0 if name in known and part else 0.0
            if part != said[name]:
                self.missing.append(f"offload.{name}={part:g}: {'all' if said[name] else 'none'} of it instead")
        self.set(offload=Offload(**said))

    def only_schedules(self, *names: str) -> None:
        """Choose 1F1B for an unknown schedule, with the stages of a device group joined."""
        schedule = self.uniform.schedule
        if schedule.name in names:
            return
        groups = [0] * self.uniform.groups
        for stage, count in enumerate(self.uniform.blocks):
            groups[group_of_stage(schedule, len(self.uniform.blocks), stage)] += count
        self.missing.append(f"schedule={schedule.name}: 1f1b instead")
        self.uniform = replace(self.uniform, blocks=tuple(groups), schedule=Schedule())

    def only_precision(self, *names: str) -> None:
        """Choose bf16 for an unknown precision."""
        if self.job.precision not in names:
            self.missing.append(f"precision={self.job.precision}: bf16 instead")
            self.job = replace(self.job, precision="bf16")

    def only_optimizer(self, *names: str) -> None:
        """Choose AdamW for an unknown optimizer."""
        if self.job.optimizer not in names:
            self.missing.append(f"optimizer={self.job.optimizer}: adamw instead")
            self.job = replace(self.job, optimizer="adamw")

    def only_overlap(self, overlap: Overlap, line: str) -> None:
        """Other communication under computation, and why."""
        if self.uniform.overlap != overlap:
            self.missing.append(line)
            self.uniform = replace(self.uniform, overlap=overlap)

    def one_overlap(self, line: str) -> None:
        """One switch hides gradients and gathered parameters."""
        gradients = self.uniform.overlap.gradients
        self.only_overlap(Overlap(gradients=gradients, parameters=gradients), line)

    def no_overlap_choices(self) -> None:
        """A framework decides on its own what travels under what."""
        self.only_overlap(Overlap(), "overlap: decided by the framework")

    def dealt_evenly(self) -> None:
        """1F1B of stages with as many blocks each, as near as they go."""
        uniform = self.uniform
        self.uniform = replace(uniform, schedule=Schedule(), blocks=dealt(sum(uniform.blocks), uniform.groups))

    def whole_group(self) -> None:
        """Shard ZeRO over all replicas."""
        if self.uniform.strategy.zero_group:
            self.say(f"zero_group={self.uniform.strategy.zero_group}: shards over all replicas", zero_group=0)


def in_order(pipeline: Pipeline) -> bool:
    """Return True if the first group of stages has the first devices, the second the next, and so on."""
    each, count = len(pipeline.stages[0].ranks), len(pipeline.stages)
    groups = [group_of_stage(pipeline.schedule, count, stage) for stage in range(count)]
    return all(
        stage.ranks == tuple(range(group * each, group * each + each))
        for stage, group in zip(pipeline.stages, groups, strict=True)
    )
