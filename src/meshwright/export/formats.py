"""Every format by name; a format's file is imported only when it is used. Each holds one `FORMAT`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from meshwright.errors import InputError, UnknownName
from meshwright.export.contract import Beside, Exported, Format, Imported
from meshwright.plan import Job, Plan

FORMATS: dict[str, str] = {
    "megatron": "meshwright.export.megatron",
    "nemo": "meshwright.export.megatron.nemo",
    "mindspeed": "meshwright.export.megatron.mindspeed",
    "slime": "meshwright.export.megatron.slime",
    "torchtitan": "meshwright.export.torchtitan",
    "deepspeed": "meshwright.export.deepspeed",
    "accelerate": "meshwright.export.accelerate",
    "galvatron": "meshwright.export.galvatron",
    "verl": "meshwright.export.verl",
    "areal": "meshwright.export.areal",
    "openrlhf": "meshwright.export.openrlhf",
}


def format_named(name: str) -> Format:
    """Look a format up."""
    if name not in FORMATS:
        raise UnknownName("format", name, FORMATS, see=", ".join(FORMATS))
    module: Any = import_module(FORMATS[name])
    found: Format = module.FORMAT
    return found


def export(job: Job, plan: Plan, name: str) -> Exported:
    """A plan in the words of a framework."""
    return format_named(name).write(job, plan)


def read(text: str, name: str, file: str, beside: Beside) -> Imported:
    """A configuration of a framework as a plan."""
    found = format_named(name)
    if found.read is None:
        able = ", ".join(other for other in FORMATS if format_named(other).read)
        raise InputError(f"{found.title} cannot be read", field="--from", valid=able)
    return found.read(text, file, beside)
