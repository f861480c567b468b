"""Write a model as a table and read it back, for models that no config describes (traced modules).

Equal layers are written once under `kinds` and referred to by number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import msgspec

from meshwright.base.tables import Table, convert
from meshwright.errors import InputError
from meshwright.models.layer import Kept, Layer, Op, Weight
from meshwright.models.model import Model

# Coefficients of fitted polynomials may be negative; their sum may not.
_COEFFICIENTS = {"flops_per_token", "flops_per_pair", "flops_per_sample", "per_token", "per_pair", "per_sample"}
_PARTS: dict[str, type] = {"ops": Op, "weights": Weight, "keeps": Kept}


def write_model(model: Model) -> dict[str, Any]:
    """Return the table from which `written_model` rebuilds an equal model."""
    kinds: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    for layer in model.layers:
        body = _without_defaults(layer)
        name, block = body.pop("name"), body.pop("block", "")
        if body not in kinds:
            kinds.append(body)
        layers.append({"name": name, **({"block": block} if block else {}), "kind": kinds.index(body)})
    facts = {"max_seq_len": model.max_seq_len, "learned_positions": model.learned_positions, "tokens": model.tokens}
    facts = {key: value for key, value in facts.items() if value}
    return {"name": model.name, "family": model.family, **facts, "kinds": kinds, "layers": layers}


class _WrittenLayer(Table, frozen=True, kw_only=True):
    name: str
    kind: int
    block: str = ""


class _WrittenModel(Table, frozen=True, kw_only=True):
    name: str
    family: str
    kinds: list[dict[str, Any]]
    layers: list[_WrittenLayer]
    max_seq_len: int = 0
    learned_positions: bool = False
    tokens: int = 0


def written_model(table: Mapping[str, Any]) -> Model:
    """Rebuild a model from its table."""
    written = convert(dict(table), _WrittenModel)
    for i, kind in enumerate(written.kinds):
        _check(kind, Layer, f"kinds[{i}]")
    layers = []
    for i, row in enumerate(written.layers):
        if not 0 <= row.kind < len(written.kinds):
            raise InputError(f"is {row.kind}", field=f"layers[{i}].kind", valid=f"0 to {len(written.kinds) - 1}")
        body = {"name": row.name, "block": row.block, **written.kinds[row.kind]}
        try:
            layers.append(msgspec.convert(body, Layer))
        except msgspec.ValidationError as error:
            raise InputError(f"is not a layer: {error}", field=f"kinds[{row.kind}]") from None
    names = [layer.name for layer in layers]
    if not layers or len(set(names)) != len(names):
        raise InputError("needs layers with names of their own", field="layers")
    return Model(
        written.name, written.family, tuple(layers), written.max_seq_len, written.learned_positions, written.tokens,
        reference=dict(table),
    )  # fmt: skip


def _check(part: Any, kind: type, where: str) -> None:
    """Check that fields exist and numbers are possible: finite, not negative, and units at least 1."""
    if not isinstance(part, dict):
        raise InputError("is not an object", field=where)
    known = {field.name for field in fields(kind)}
    for name, value in part.items():
        if name not in known:
            raise InputError(f"unknown field '{name}'", field=where, valid=", ".join(sorted(known)))
        least = -math.inf if name in _COEFFICIENTS else 0
        if isinstance(value, int | float) and not (least <= value < math.inf and value > -math.inf):
            raise InputError(f"is {value}", field=f"{where}.{name}", valid="0 or more")
        if name in _PARTS:
            for i, item in enumerate(value if isinstance(value, list) else [value]):
                _check(item, _PARTS[name], f"{where}.{name}[{i}]")
    if kind is Weight and (part.get("units", 1) < 1 or (part.get("split") == "expert" and part.get("experts", 0) < 1)):
        raise InputError(
            "has nothing to divide by", field=where, valid="units of 1 or more, experts where split is expert"
        )


def _without_defaults(item: Layer | Op | Weight | Kept) -> dict[str, Any]:
    full = asdict(item)
    facts = {}
    for fact in fields(item):
        value = getattr(item, fact.name)
        if value != fact.default:
            facts[fact.name] = [_without_defaults(v) for v in value] if fact.name in _PARTS else full[fact.name]
    return facts
