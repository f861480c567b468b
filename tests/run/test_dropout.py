"""Dropout: the generator against published words, masks as statistics, training against transformers' own models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import meshwright as mw
from meshwright.errors import InputError
from meshwright.run.data import open_data
from meshwright.run.data.prefetch import Feed
from meshwright.run.folder.checkpoint.huggingface import write_weights
from meshwright.run.models import Context, build
from meshwright.run.models.dropout import Masks, philox
from meshwright.run.parallel.apply import apply
from tests.run.families import CONFIGS
from tests.run.parity import BATCH, LENGTH, batches, plan_of

GPT2 = {**CONFIGS["gpt2"], "resid_pdrop": 0.15, "embd_pdrop": 0.1, "attn_pdrop": 0.2}


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123's kat_vectors, philox4x32 10
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_words_of_philox_as_published(counter: str, key: str, words: str) -> None:
    left, right = (int(word, 16) for word in key.split())
    found = philox([torch.tensor(int(word, 16)) for word in counter.split()], (left, right))
    assert " ".join(f"{int(word):08x}" for word in found) == words


def mask(rate: float = 0.3, *, seed: int = 1, step: int = 0, site: str = "embed", rows: int = 0) -> torch.Tensor:
    """64 x 128 x 96 elements."""
    row = torch.arange(rows, rows + 64)
    return Masks(seed, step, 0).kept(site, rate, row, torch.arange(128), [(0, 96)])


def test_masks_drop_as_many_as_asked() -> None:
    for rate in (0.1, 0.3, 0.5):
        kept = mask(rate).double()
        assert abs(float(kept.mean()) - (1 - rate)) < 5 * (rate * (1 - rate) / kept.numel()) ** 0.5
        for dims in ((0, 1), (0, 2), (1, 2)):  # in every channel, at every place, in every sample
            means = kept.mean(dim=dims)
            spread = (rate * (1 - rate) * means.numel() / kept.numel()) ** 0.5
            assert float((means - (1 - rate)).abs().max()) < 5 * spread
            assert 0.7 < float(means.std()) / spread < 1.3


def test_masks_of_other_steps_samples_and_layers_are_independent() -> None:
    first = mask().double() - 0.7
    others = (mask(step=1), mask(seed=2), mask(site="block.0.mlp.down"), mask(rows=64))
    shifted = (first.roll(1, dims) + 0.7 for dims in range(3))
    for other in (*others, *shifted):
        found = float((first * (other.double() - 0.7)).mean()) / (0.3 * 0.7)
        assert abs(found) < 5 / first.numel() ** 0.5


def test_a_part_of_a_mask_is_the_mask_of_the_part() -> None:
    masks, rows, places = Masks(3, 4, 0), torch.tensor([5, 9]), torch.tensor([7, 2, 30])
    whole = masks.kept("core", 0.4, torch.arange(10), torch.arange(32), [(0, 32)])
    part = masks.kept("core", 0.4, rows, places, [(3, 10), (21, 22)])
    columns = torch.tensor([*range(3, 10), 21])
    assert torch.equal(part, whole[rows][:, places][:, :, columns])


def in_order(model: mw.Model, heads: int, step: list[int], seed: int) -> Callable[..., torch.Tensor]:
    """What stands for PyTorch's dropout in transformers: masks of our generator, in the order in which it asks."""
    sites: list[str] = []

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        assert training
        if not p:
            return x
        if not sites:
            gpt2 = "gpt2" in str(model.reference)
            sites.extend(["embed"] if gpt2 else [])
            for i in range(2):
                sites.append(f"block.{i}.attention.core")
                sites.extend([f"block.{i}.attention.proj", f"block.{i}.mlp.down"] if gpt2 else [])
        site = sites.pop(0)
        batch, length, width = x.shape[0], x.shape[-2], x.shape[-1]
        assert site.endswith("core") == (x.dim() == 4)
        rows = torch.arange(batch * heads if x.dim() == 4 else batch)
        kept = Masks(seed, step[0], 0).kept(site, p, rows, torch.arange(length), [(0, width)])
        return x * kept.view_as(x) / (1 - p)

    return dropout


def adamw(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=1e-3, eps=1e-6)


@pytest.mark.parametrize(
    "config", [GPT2, *({**CONFIGS[n], "attention_dropout": 0.2} for n in ("llama", "deepseek-v3"))]
)
def test_training_as_transformers_with_the_same_masks(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plan = plan_of("micro_batches=2", config)
    part = apply(model, plan, seed=7)
    write_weights(model, build(model, seed=7), tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").train()
    ours, other, now = adamw(part.parameters()), adamw(theirs.parameters()), [0]
    monkeypatch.setattr(torch.nn.functional, "dropout", in_order(model, 4, now, 7))
    for step, (tokens, _) in enumerate(batches("whole", 5)):
        now[0] = step
        for optimizer in (ours, other):
            optimizer.zero_grad()
        loss = theirs(tokens, labels=tokens).loss
        loss.backward()
        found = part.step(part.micro_batches(tokens, step=step), float(tokens[:, 1:].numel()))
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in theirs.parameters()])
        assert found.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert float(part.copies.norm()) == pytest.approx(float(norm), rel=1e-5)
        for optimizer in (ours, other):
            optimizer.step()


def test_evaluation_drops_nothing() -> None:
    model, plan = plan_of("micro_batches=1", GPT2)
    part = apply(model, plan, seed=7)
    tokens, _ = batches("whole")[0]
    with torch.no_grad():
        logits = build(model, seed=7)(tokens, Context.of(tokens))[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    divisor = float(tokens[:, 1:].numel())
    assert part.evaluate(part.micro_batches(tokens), divisor).loss == pytest.approx(float(expected), rel=1e-6)
    assert abs(part.step(part.micro_batches(tokens), divisor).loss - float(expected)) > 1e-4


def test_rates_that_are_left_out_are_those_of_transformers() -> None:
    config = {key: value for key, value in GPT2.items() if not key.endswith("pdrop")}
    model = mw.Model.from_config(config)
    decoder = build(model)
    theirs = transformers.GPT2Config()
    assert decoder.layer("embed").dropout == theirs.embd_pdrop
    assert decoder.layer("block.0.attention").shape.dropout == theirs.resid_pdrop
    assert decoder.layer("block.0.attention").shape.score_dropout == theirs.attn_pdrop
    assert decoder.layer("block.1.mlp").shape.dropout == theirs.resid_pdrop


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("llama", "resid_pdrop"),
        ("llama", "hidden_dropout"),
        ("gpt2", "attention_dropout"),
        ("mixtral", "router_jitter_noise"),
    ],
)
def test_noise_that_no_layer_has_is_refused(name: str, field: str) -> None:
    with pytest.raises(InputError, match=rf"{field}: .*valid: 0"):
        build(mw.Model.from_config({**CONFIGS[name], field: 0.1}))


def test_a_feed_says_which_step_and_samples_a_micro_batch_is_of() -> None:
    part = apply(*plan_of("micro_batches=4", CONFIGS["gpt2"]))
    source = open_data("synthetic", vocab=64, seq_len=LENGTH, global_batch=BATCH)
    with Feed(source, part, range(3, 5), "cpu") as feed:
        found = [[(one.step, one.row) for one in some] for _, some in feed]
    assert found == [[(step, row) for row in (0, 2, 4, 6)] for step in (3, 4)]


def test_a_run_that_goes_on_under_another_plan_drops_the_same(tmp_path: Path) -> None:
    def losses(table: str, steps: int, folder: str, **options: Any) -> list[float]:
        plan = plan_of(table, GPT2)[1]
        run = {"warmup": 0, "decay": "constant", "output": str(tmp_path / folder), **options}
        return [event["loss"] for event in mw.train(plan, steps=steps, **run) if event["event"] == "step"]

    whole = losses("micro_batches=1", 4, "whole")
    assert losses("micro_batches=1", 2, "parts") == pytest.approx(whole[:2], rel=1e-6)
    assert losses("micro_batches=4,recompute=full", 4, "parts", resume=True) == pytest.approx(whole[2:], rel=1e-6)
