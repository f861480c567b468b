"""Rules that a plan must keep, one function each; a rule's name is the function's name with dashes.

A rule yields its violations; `check` raises the first. Rules run in order, and each may rely on the ones before it. A
plan is therefore never checked against a missing layer or device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from meshwright.errors import PlanError
from meshwright.plans.document import Plan
from meshwright.plans.job import Job
from meshwright.plans.rules.case import Broken, Case
from meshwright.plans.rules.choices import compressed_layers, memory_known, precision_supported, recompute, swaps
from meshwright.plans.rules.divisibility import experts, heads, sequence, tensor_parallel, widths, zero_groups
from meshwright.plans.rules.layout import axis_order, batch, degrees, device_sets, layer_cover, layer_names, schedule

Rule = Callable[[Case], Iterator[Broken]]

RULES: tuple[Rule, ...] = (
    layer_names, layer_cover, device_sets, degrees, axis_order, schedule, batch, tensor_parallel, heads, widths,
    experts, sequence, zero_groups, recompute, swaps, precision_supported, memory_known, compressed_layers,
)  # fmt: skip


def check(plan: Plan, job: Job) -> None:
    """Raise the first broken rule as a `PlanError`."""
    case = Case(plan, job)
    for rule in RULES:
        for broken in rule(case):
            raise PlanError(rule_name(rule), broken.problem, field=broken.field, valid=broken.valid)


def rule_name(rule: Rule) -> str:
    return rule.__name__.replace("_", "-")
