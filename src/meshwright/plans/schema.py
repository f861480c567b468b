"""The JSON Schema of the plan document, made from the types that read it."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.plans.document import Plan
from meshwright.plans.short_form import ShortPlan


def schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12); it accepts the full and the short form.

    >>> schema()["title"]
    'meshwright plan'
    """
    _, parts = msgspec.json.schema_components([Plan, ShortPlan], ref_template="#/$defs/{name}")
    for part in parts.values():
        part["description"] = part.get("description", "").split("\n")[0]
    made = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "meshwright plan",
        "description": "Which devices train which layers how. Full form: pipelines. Short form: degrees.",
        "if": {"anyOf": [{"required": ["pipelines"]}, {"required": ["format"]}]},
        "then": {"$ref": "#/$defs/Plan"},
        "else": {"$ref": "#/$defs/ShortPlan"},
        "$defs": parts,
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(made))  # lists for tuples
    return plain
