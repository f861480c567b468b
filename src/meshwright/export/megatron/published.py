"""The arguments that each framework lists itself, with source and commit (`published.json`)."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def published(name: str) -> frozenset[str]:
    """Names without their dashes.

    >>> "tensor-model-parallel-size" in published("megatron")
    True
    """
    return frozenset(_lists()[name]["names"])


def source(name: str) -> str:
    """Where a list comes from.

    >>> source("megatron").split(",")[0]
    'NVIDIA/Megatron-LM'
    """
    return str(_lists()[name]["source"])


@cache
def _lists() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("published.json").read_text("utf-8")
    return dict(json.loads(text))
