"""A model written out as a table, for models that no config describes (traced modules).

Layers that are alike are written once under `kinds` and referred to by number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.model.chain import Model
from meshwright.model.layer import Kept, Layer, Op, Weight


def write_model(model: Model) -> dict[str, Any]:
    """The table from which `written_model` rebuilds an equal model."""
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


class _WrittenLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    kind: int
    block: str = ""


class _WrittenModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    family: str
    kinds: list[dict[str, Any]]
    layers: list[_WrittenLayer]
    max_seq_len: int = 0
    learned_positions: bool = False
    tokens: int = 0


def written_model(table: Mapping[str, Any]) -> Model:
    """Rebuild a model from its table."""
    try:
        written = msgspec.convert(dict(table), _WrittenModel)
        layers = []
        for row in written.layers:
            body = {"name": row.name, "block": row.block, **written.kinds[row.kind]}
            layers.append(msgspec.convert(body, Layer))
    except (msgspec.ValidationError, IndexError) as error:
        raise InputError(f"is not a written-out model: {error}") from None
    if not layers:
        raise InputError("has no layers", field="layers")
    return Model(
        written.name, written.family, tuple(layers), written.max_seq_len, written.learned_positions, written.tokens,
        reference=dict(table),
    )  # fmt: skip


def _without_defaults(item: Layer | Op | Weight | Kept) -> dict[str, Any]:
    full = asdict(item)
    facts = {}
    for fact in fields(item):
        value = getattr(item, fact.name)
        if value == fact.default:
            continue
        facts[fact.name] = (
            [_without_defaults(v) for v in value] if fact.name in {"ops", "weights", "keeps"} else full[fact.name]
        )
    return facts
