"""What was chosen? The job and the plan document: full and short form, rules, schema, picture."""

import sys

from meshwright.plan.actions import action_table, in_flight
from meshwright.plan.document import Backup, Compression, Pipeline, Plan, Stage
from meshwright.plan.job import OPTIMIZERS, Job
from meshwright.plan.reading import read_plan
from meshwright.plan.rules import RULES, check, rule_name
from meshwright.plan.schedule import Schedule, group_of_stage
from meshwright.plan.schema import schema
from meshwright.plan.short import parse_short
from meshwright.plan.strategy import Offload, Span, Strategy, Swap

__all__ = [
    "OPTIMIZERS", "RULES", "Backup", "Compression", "Job", "Offload", "Pipeline", "Plan", "Schedule", "Span", "Stage",
    "Strategy", "Swap",
    "action_table", "check", "group_of_stage", "in_flight", "parse_short", "read_plan", "rule_name", "schema",
]  # fmt: skip

# The verb `meshwright.plan(job)` needs the rooms above: whoever has them gives it, and nothing of them is imported here.
sys.modules[__name__].__class__ = sys.modules["meshwright"].PlanRoom
