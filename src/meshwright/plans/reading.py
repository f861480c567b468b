"""Read a table into a checked plan and its job: find the form, resolve the files, check the rules."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from meshwright.base.tables import convert
from meshwright.errors import InputError, kind_of
from meshwright.plans.document import FORMAT, VERSION, Plan
from meshwright.plans.job import Job, WrittenJob
from meshwright.plans.rules import check
from meshwright.plans.short_form import expand


def read_plan(table: object, job: Job | None = None, file: str = "") -> tuple[Plan, Job]:
    """Read the full or the short form; every error names the file and the field as the user wrote it."""
    try:
        if not isinstance(table, Mapping):
            raise InputError(f"holds {kind_of(table)}, expected an object")
        if not all(isinstance(key, str) for key in table):
            raise InputError("has a key that is no string")
        if "pipelines" in table or table.get("format") == FORMAT:
            return _read_full(dict(table), job, os.path.dirname(file))
        return _read_short(dict(table), job, os.path.dirname(file))
    except InputError as error:
        raise error.at(file=file) from None


def _read_full(table: dict[str, Any], job: Job | None, folder: str) -> tuple[Plan, Job]:
    version = table.get("version", VERSION)
    if isinstance(version, int) and version > VERSION:
        problem = f"is {version}, written by a newer meshwright; this one reads up to {VERSION}"
        raise InputError(problem, field="version", valid=f"1 to {VERSION}")
    plan = convert(table, Plan)
    own = plan.job.resolve(folder)
    if job is not None and job != own:
        raise InputError("differs from the job given beside the plan", field="job")
    check(plan, own)
    return replace(plan, job=_standing_alone(plan.job, own)), own


def _standing_alone(written: WrittenJob, job: Job) -> WrittenJob:
    """Replace paths by the contents they lead to; names and tables stay as written."""
    full = job.written()
    model = full.model if isinstance(written.model, str) and not isinstance(full.model, str) else written.model
    cluster = (
        full.cluster if isinstance(written.cluster, str) and not isinstance(full.cluster, str) else written.cluster
    )
    return replace(written, model=model, cluster=cluster)


def _read_short(table: dict[str, Any], job: Job | None, folder: str) -> tuple[Plan, Job]:
    plan, job = expand(table, job, folder)
    try:
        check(plan, job)
    except InputError as error:
        error.field = _as_written(error.field, bool(table.get("stages")))
        raise
    return plan, job


def _as_written(field: str, stages: bool) -> str:
    """Return a full-form field in short form: pipelines[0].stages[2].spans[0].tp is stages[2].tp, or tp."""
    inside = r"\2" if not stages else r"stages[\1].\2"
    field = re.sub(r"^pipelines\[0\]\.stages\[(\d+)\](?:\.spans(?:\[0\])?)?\.?(.*)$", inside, field)
    field = re.sub(r"^(pipelines\[0\]|job)\.?", "", field).removesuffix(".")
    return {"schedule.virtual": "virtual", "schedule.name": "schedule"}.get(field, field)
