"""Modules of the chain: what does not depend on transformers."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from meshwright.errors import InputError
from meshwright.run.models import Context, build
from tests.run.families import CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    """One sample of three documents gives the logits of each on its own."""
    decoder = build(mw.Model.from_config(CONFIGS[name]))
    lengths = [7, 4, 10]
    tokens = torch.randint(0, 64, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    with torch.no_grad():
        packed = decoder(tokens, Context.of(tokens, documents)).split(lengths, dim=1)
        for part, found in zip(tokens.split(lengths, dim=1), packed, strict=True):
            torch.testing.assert_close(found, decoder(part), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "deepseek-v3"])
def test_a_chain_cut_anywhere_computes_the_same_from_the_same_seed(name: str) -> None:
    model = mw.Model.from_config(CONFIGS[name])
    whole = build(model, seed=3)
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(2))
    context = Context.of(tokens)
    with torch.no_grad():
        expected = whole(tokens)
        for cut in range(1, len(model.layers)):
            first, second = build(model, model.layers[:cut], seed=3), build(model, model.layers[cut:], seed=3)
            if model.layers[-1].tied_to:  # the head of another stage gets the embedding's weights
                second.layer("head").weight.copy_(first.layer("embed").tokens.weight)
            torch.testing.assert_close(second(first(tokens, context), context), expected, atol=0, rtol=0)


def test_presets_build_and_count_as_planned() -> None:
    for name in ("tiny-gpt2", "tiny-llama", "tiny-moe"):
        model = mw.Model.preset(name)
        assert sum(p.numel() for p in build(model).parameters()) == model.parameters


def test_the_bottleneck_of_bigmac_is_built() -> None:
    model = mw.Model.from_config({**CONFIGS["qwen3-moe"], "moe_bottleneck_size": 8})
    decoder = build(model)
    assert sum(p.numel() for p in decoder.parameters()) == model.parameters
    assert decoder(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()


def test_a_family_that_cannot_be_trained_is_named() -> None:
    with pytest.raises(InputError, match="the family 'bert' cannot be trained"):
        build(mw.Model.preset("bert-base"))
    with pytest.raises(InputError, match="is 'relu'"):
        build(mw.Model.from_config({**CONFIGS["llama"], "hidden_act": "relu"}))
    with pytest.raises(InputError, match="is 'longrope'"):
        build(mw.Model.from_config({**CONFIGS["llama"], "rope_scaling": {"rope_type": "longrope", "factor": 2.0}}))
