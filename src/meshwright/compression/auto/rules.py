"""Write a decision as a plan's rules: layers, an algorithm, and its options (pieces are left to the runtime)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from meshwright.compression.auto.inputs import Way
from meshwright.compression.codec import unusual
from meshwright.models import Model
from meshwright.plans import Compression
from meshwright.plans.spans import span_name


def rules(ways: Mapping[str, Way], model: Model | None = None) -> tuple[Compression, ...]:
    """Return rules by layer.

    Consecutive layers of a model with one strategy become one rule; without a model every name has its own.

    >>> from meshwright.compression.codec import codec
    >>> from meshwright.compression.sync.layout import Choice
    >>> int8, plain = Way(Choice(codec("int8"), "scatter")), Way(Choice())
    >>> rules({"a.weight": int8, "b.weight": plain})
    (Compression(layers='a.weight', algorithm='int8', options={'topology': 'scatter'}),)
    >>> ways = {"block.0.attention": int8, "block.0.mlp": int8, "block.1.attention": int8, "head": plain}
    >>> [rule.layers for rule in rules(ways, Model.preset("tiny-llama"))]
    ['block.0..block.1.attention']
    """
    if model is None:
        return tuple(_rule(name, way) for name, way in ways.items() if not way.exact)
    found = []
    for way, places in groupby(range(len(model.layers)), key=lambda i: ways.get(model.layers[i].name)):
        run = list(places)
        if way is not None and not way.exact:
            found.append(_rule(span_name(model, range(run[0], run[-1] + 1)), way))
    return tuple(found)


def _rule(layers: str, way: Way) -> Compression:
    kind = way.choice.codec
    options: dict[str, float | str] = {**unusual(kind), "topology": way.choice.topology}
    return Compression(layers=layers, algorithm=kind.name, options=options)
