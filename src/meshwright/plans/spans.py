"""The two small notations of a plan: spans of layers and sets of devices."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from meshwright.clusters import MOST_DEVICES
from meshwright.errors import InputError, shorten
from meshwright.models import Layer, Model


def layer_range(model: Model, text: str) -> range:
    """Parse `embed..block.39` (both ends included; a block means all its layers), or one name.

    >>> from meshwright.models import Model
    >>> layer_range(Model.preset("tiny-llama"), "embed..block.1")
    range(0, 5)
    """
    first, dots, last = text.partition("..")
    start = model.index(first.strip())
    end = model.index((last if dots else first).strip(), last=True)
    if end < start:
        raise InputError(f"the span '{shorten(text)}' ends before it begins", valid="FIRST..LAST in the model's order")
    return range(start, end + 1)


def layers_of(model: Model, text: str) -> tuple[Layer, ...]:
    """Return the layers of a span."""
    found = layer_range(model, text)
    return model.layers[found.start : found.stop]


def alike(layers: Iterable[Layer]) -> list[tuple[Layer, int]]:
    """Return one layer of each kind, with its count: the blocks of a model repeat a few kinds.

    >>> from meshwright.models import Model
    >>> [(layer.name, count) for layer, count in alike(Model.preset("llama3-8b").layers)][:2]
    [('embed', 1), ('block.0.attention', 32)]
    """
    found: dict[tuple[object, ...], tuple[Layer, int]] = {}
    for layer in layers:
        first, count = found.setdefault(sort_of(layer), (layer, 0))
        found[sort_of(layer)] = (first, count + 1)
    return list(found.values())


def sort_of(layer: Layer) -> tuple[object, ...]:
    """Return a key that is equal for layers of equal cost; equal layers share operators, so identity suffices."""
    own = (id(layer.ops), layer.opens_block, layer.width_in, layer.width_out, layer.tokens, layer.heads, layer.kv_heads)
    return *own, layer.tied_to, layer.carried


def span_name(model: Model, layers: range) -> str:
    """Return the shortest notation of a range of layers: whole blocks by the block's name."""
    first, last = model.layers[layers[0]], model.layers[layers[-1]]
    if len(layers) == 1:
        return first.name
    before = model.layers[layers[0] - 1].block if layers[0] else ""
    after = model.layers[layers[-1] + 1].block if layers[-1] + 1 < len(model.layers) else ""
    start = first.block if first.block and first.block != before else first.name
    end = last.block if last.block and last.block != after else last.name
    return start if start == end else f"{start}..{end}"


@lru_cache(maxsize=4096)
def device_ranks(text: str) -> tuple[int, ...]:
    """Parse `0-31`, `0-7,16-23`, or with a stride `0-62/2`.

    >>> device_ranks("0-3,8"), device_ranks("0-6/2")
    ((0, 1, 2, 3, 8), (0, 2, 4, 6))
    """
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:-(\d{1,7})(?:/(\d{1,6}))?)?\s*", part, re.ASCII)
        if not match:
            problem = f"'{shorten(text)}' is not a set of devices"
            raise InputError(problem, valid="numbers and ranges such as 0-31 or 0-7,16-23 or 0-62/2")
        low = int(match[1])
        high, step = int(match[2] or low), int(match[3] or 1)
        if high < low or step < 1 or high >= MOST_DEVICES:
            valid = f"0 to {MOST_DEVICES - 1}, low to high"
            raise InputError(f"'{shorten(part)}' is not a range of devices", valid=valid)
        ranks.extend(range(low, high + 1, step))
    if len(set(ranks)) != len(ranks):
        raise InputError(f"'{shorten(text)}' names a device twice")
    return tuple(ranks)


def device_text(ranks: list[int]) -> str:
    """Return devices in the notation of a plan.

    >>> device_text([0, 1, 2, 3]), device_text([5]), device_text([0, 1, 4, 5])
    ('0-3', '5', '0-1,4-5')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
