"""Convert a Hugging Face `config.json` to a `Model`, without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.base.files import read_json
from meshwright.errors import InputError, closest_names, kind_of, shorten
from meshwright.models.families import FAMILIES
from meshwright.models.families.fields import Fields
from meshwright.models.model import Model

# Fields that let a config of an unknown family be read as a Llama-like decoder.
_DECODER_FIELDS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
)  # fmt: skip


def config_model(config: str | Path | Mapping[str, Any], name: str = "") -> Model:
    """Return the model of a config, or report which of its fields prevent it."""
    from_file = isinstance(config, str | Path)
    file = str(config) if from_file else ""
    content = read_json(file) if from_file else config
    if not isinstance(content, Mapping):
        raise InputError(f"holds {kind_of(content)}, expected an object", file=file)
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise _unsupported(content, file)
    family = FAMILIES[kind]
    _check_architecture(content, family.architectures, file)
    fields = Fields(content, file)
    layers = tuple(family.build(fields))
    tokens = layers[0].tokens
    longest = fields.integer("n_positions", "max_position_embeddings", "seq_length", default=family.longest)
    label = name or content.get("_name_or_path") or (Path(file).parent.name if file else "") or kind
    reference = {key: value for key, value in content.items() if key not in {"id2label", "label2id"}}
    if isinstance(content.get("id2label"), dict):
        reference["num_labels"] = len(content["id2label"])  # the names of the classes do not matter here
    reference["_name_or_path"] = str(label)
    return Model(str(label), kind, layers, tokens or longest, family.learned_positions, tokens, reference=reference)


def _unsupported(content: Mapping[str, Any], file: str) -> InputError:
    family = content.get("model_type")
    valid = ", ".join(FAMILIES)
    if family is None:
        keys = ", ".join(map(str, list(content)[:6])) or "nothing"
        return InputError(f"is missing; the config has {keys}", file=file, field="model_type", valid=valid)
    missing = [field for field in _DECODER_FIELDS if field not in content]
    near = closest_names(str(family), FAMILIES, limit=1)
    problem = f"the family '{shorten(str(family), 40)}' is not supported"
    problem += f"; did you mean {near[0]}?" if near else ""
    if missing:
        problem += f"; of the fields of a Llama-like decoder it lacks {', '.join(missing)}"
    else:
        problem += "; it has the fields of a decoder, but what it makes of them is not known here"
    problem += "; Model.from_module takes any module"
    return InputError(problem, file=file, field="model_type", valid=valid)


def _check_architecture(content: Mapping[str, Any], known: tuple[str, ...], file: str) -> None:
    """Refuse a class with another head: its parameters differ, so the count would be wrong."""
    listed = content.get("architectures")
    if listed is None:
        return
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise InputError("is not a list of class names", file=file, field="architectures", valid=", ".join(known))
    if listed and not set(listed) & set(known):
        problem = f"{', '.join(map(shorten, listed))} is not a class whose parameters are known here"
        raise InputError(problem, file=file, field="architectures", valid=", ".join(known))
