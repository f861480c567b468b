"""Apply a plan's recompute settings to a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshwright.models import Layer
from meshwright.models.layer import Recompute

if TYPE_CHECKING:
    from meshwright.run.models import Decoder


def recompute(decoder: Decoder, layers: Mapping[Layer, Recompute]) -> None:
    """Set each layer's recompute: none, cheap operators, operators by name, or the whole block, which keeps its input.

    Layers that are not named stay as they are. A block is split where its layers' settings differ.

    >>> from meshwright.models import Model
    >>> from meshwright.run.models import build
    >>> model = Model.preset("tiny-llama")
    >>> decoder = build(model)
    >>> recompute(decoder, dict.fromkeys(model.layers, "selective"))
    >>> sorted(decoder.layer("block.0.mlp").repeated)
    ['activation', 'norm']
    """
    whole: dict[str, tuple[str, ...]] = {}
    opened: Layer | None = None  # the first of layers that are recomputed together
    for layer, how in layers.items():
        if how == "full" and layer.block:
            if opened is None or opened.block != layer.block or layer.opens_block:
                opened = layer
            whole[opened.name] = (*whole.get(opened.name, ()), layer.name)
            continue
        opened = None
        module = decoder.layer(layer.name)
        if hasattr(module, "repeated"):
            module.repeated = layer.recomputed_ops(how)
    decoder.whole |= whole
    decoder.inside |= {name for names in whole.values() for name in names[1:]}
