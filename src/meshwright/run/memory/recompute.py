"""What a plan says of layers' recomputation, applied to a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from meshwright.models import Layer
from meshwright.models.layer import Recompute

if TYPE_CHECKING:
    from meshwright.run.models import Decoder


def recompute(decoder: Decoder, layers: Mapping[Layer, Recompute]) -> None:
    """Of every layer: nothing, what is cheap, operators by name, or the block as a whole, of which the input is kept.

    Layers that are not named stay as they are. A block is cut where its layers are of different opinions.

    >>> from meshwright.models import Model
    >>> from meshwright.run.models import build
    >>> model = Model.preset("tiny-llama")
    >>> decoder = build(model)
    >>> recompute(decoder, dict.fromkeys(model.layers, "selective"))
    >>> sorted(decoder.layer("block.0.mlp").repeated)
    ['activation', 'norm']
    """
    whole: dict[str, tuple[str, ...]] = {}
    opened: Layer | None = None  # the first of layers that are repeated together
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
