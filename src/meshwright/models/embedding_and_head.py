"""Layers before and after the blocks: embedding, final norm, language head."""

from __future__ import annotations

from meshwright.models.layer import Kept, Layer, Op, Weight
from meshwright.models.operators import NormKind, Place, dropout, layer_input, matmul, norm, norm_weight, statistics


def embedding(
    place: Place, vocab: int, hidden: int, *, positions: int = 0, types: int = 0, norm_kind: NormKind | None = None,
    dropout_rate: float = 0.0, tied_to: str = "",
) -> Layer:  # fmt: skip
    """Return the lookup of tokens, positions and types; the table is sharded over the vocabulary."""
    table = (Weight(vocab * hidden, "tensor", vocab),)
    ops = [Op("lookup", "lookup", scope="sequence", moves=2.0 * hidden, weights=table, tied=bool(tied_to))]
    if positions or types:
        ops.append(
            Op(
                "positions",
                "lookup",
                scope="sequence",
                moves=3.0 * hidden,
                weights=(Weight((positions + types) * hidden),),
            )
        )
    if norm_kind:
        weights = (norm_weight(hidden, norm_kind),)
        ops += [
            layer_input(hidden),
            Op("norm", "norm", scope="sequence", moves=2.0 * hidden, weights=weights, keeps=(statistics(norm_kind),)),
        ]
    ops += dropout(hidden, dropout_rate)
    return place.layer("embedding", tuple(ops), 0.0, hidden, tied_to=tied_to)


def final_norm(place: Place, hidden: int, kind: NormKind, *, dropout_rate: float = 0.0) -> Layer:
    """Return the norm after the last block; its output is kept as the input of the next layer."""
    ops = (layer_input(hidden), norm("norm", hidden, kind), *dropout(hidden, dropout_rate))
    return place.layer("norm", ops, hidden)


def language_head(place: Place, vocab: int, hidden: int, *, tied_to: str = "") -> Layer:
    """Return the projection to the vocabulary and the loss, which keeps the logits in float32 where they are whole."""
    logits = Kept("logits", vocab, dtype="fp32", scope="tensor", when="whole_logits")
    ops = (
        matmul("logits", hidden, vocab, units=vocab, keeps=(logits,), tied=bool(tied_to)),
        Op("loss", "loss", moves=vocab),
    )
    return place.layer("head", ops, hidden, 0.0, tied_to=tied_to)
