"""The job and the plan document: full and short form, rules, schema, picture."""

from meshwright.plans.action_table import action_table, in_flight
from meshwright.plans.document import Backup, Compression, Pipeline, Plan, Stage
from meshwright.plans.job import OPTIMIZERS, Job
from meshwright.plans.reading import read_plan
from meshwright.plans.rules import RULES, check, rule_name
from meshwright.plans.schedule import Schedule, group_of_stage
from meshwright.plans.schema import schema
from meshwright.plans.short_form import parse_short
from meshwright.plans.strategy import Offload, Span, Strategy, Swap

__all__ = [
    "OPTIMIZERS", "RULES", "Backup", "Compression", "Job", "Offload", "Pipeline", "Plan", "Schedule", "Span", "Stage",
    "Strategy", "Swap",
    "action_table", "check", "group_of_stage", "in_flight", "parse_short", "read_plan", "rule_name", "schema",
]  # fmt: skip
