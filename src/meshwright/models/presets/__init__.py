"""Presets of models by name: the shape fields of a Hugging Face config, with their source."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from meshwright.errors import UnknownName, plain
from meshwright.models.from_config import config_model
from meshwright.models.model import Model


@dataclass(frozen=True, slots=True)
class Preset:
    """Entry of the catalogue of models."""

    name: str
    title: str
    source: str
    aliases: tuple[str, ...]
    architecture: str  # the transformers class with the same parameters
    config: dict[str, Any]


@cache
def presets() -> dict[str, Preset]:
    """Return every preset by name, families in alphabetical order, sizes as the files list them.

    >>> "deepseek-v3" in presets()
    True
    """
    found: dict[str, Preset] = {}
    for file in sorted(resources.files(__package__).iterdir(), key=lambda f: f.name):
        if file.name.endswith(".json"):
            for name, entry in json.loads(file.read_text("utf-8")).items():
                found[name] = Preset(
                    name,
                    entry["title"],
                    entry["source"],
                    tuple(entry["aliases"]),
                    entry["architecture"],
                    entry["config"],
                )
    return found


@cache
def _by_spelling() -> dict[str, str]:
    return {plain(spelling): p.name for p in presets().values() for spelling in (p.name, *p.aliases)}


def find_preset(name: str) -> Preset:
    """Return a preset by name or alias; an organisation before a slash, as on the Hugging Face hub, is ignored."""
    key = _by_spelling().get(plain(name.rsplit("/", 1)[-1]))
    if key is None:
        known = [*presets(), *(alias for p in presets().values() for alias in p.aliases)]
        raise UnknownName(
            "model", name, known, see="a name listed by 'meshwright models', or the path of a config.json"
        )
    return presets()[key]


@cache
def preset_model(name: str) -> Model:
    preset = find_preset(name)
    return replace(config_model(preset.config, preset.name), reference=preset.name)
