"""Registry of formats by name; a format's file, which holds one `FORMAT`, is imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from meshwright.errors import InputError, UnknownName
from meshwright.frameworks.contract import Beside, Exported, Format, Imported
from meshwright.plans import Job, Plan

FORMATS: dict[str, str] = {
    "megatron": "meshwright.frameworks.megatron",
    "nemo": "meshwright.frameworks.megatron.relatives.nemo",
    "mindspeed": "meshwright.frameworks.megatron.relatives.mindspeed",
    "slime": "meshwright.frameworks.megatron.relatives.slime",
    "torchtitan": "meshwright.frameworks.torchtitan",
    "deepspeed": "meshwright.frameworks.deepspeed.write",
    "accelerate": "meshwright.frameworks.accelerate.write",
    "galvatron": "meshwright.frameworks.galvatron.write",
    "verl": "meshwright.frameworks.verl",
    "areal": "meshwright.frameworks.areal",
    "openrlhf": "meshwright.frameworks.openrlhf",
}


def format_named(name: str) -> Format:
    """Return a format by name."""
    if name not in FORMATS:
        raise UnknownName("format", name, FORMATS, see=", ".join(FORMATS))
    module: Any = import_module(FORMATS[name])
    found: Format = module.FORMAT
    return found


def export(job: Job, plan: Plan, name: str) -> Exported:
    """Return a plan in the format of a framework."""
    return format_named(name).write(job, plan)


def read(text: str, name: str, file: str, beside: Beside) -> Imported:
    """Read a configuration of a framework as a plan."""
    found = format_named(name)
    if found.read is None:
        able = ", ".join(other for other in FORMATS if format_named(other).read)
        raise InputError(f"{found.title} cannot be read", field="--from", valid=able)
    return found.read(text, file, beside)
