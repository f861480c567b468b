"""The loss that keeps experts equally busy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import meshwright as mw
from meshwright.errors import InputError
from meshwright.run.folder.checkpoint.huggingface import write_weights
from meshwright.run.mesh.collectives import AxisGroup
from meshwright.run.mesh.mesh import SpanMesh
from meshwright.run.models import Context, build
from meshwright.run.options import Training
from meshwright.run.parallel.apply import apply
from meshwright.run.parallel.stage import next_tokens
from meshwright.run.train import check
from tests.run.families import CONFIGS
from tests.run.parity import BATCH, GROUPS, LENGTH, batches, optimizer_of, plan_of, world_of
from tests.run.plans import pipeline, span, stage
from tests.run.pool import pool

TWO_PIPELINES = {
    "world": 2,
    "pipelines": [pipeline(stage(str(i), span("embed..head")), batch=4, micro_batches=1) for i in range(2)],
}


WEIGHT = 20.0  # so large that much of every gradient comes from this loss
BALANCED = {
    name: {**CONFIGS[name], "output_router_logits": True, "router_aux_loss_coef": WEIGHT}
    for name in ("mixtral", "qwen3-moe")
}


def pooled(found: Any, documents: torch.Tensor | None) -> torch.Tensor:
    """The loss of transformers, padding left out."""
    real = None if documents is None else (documents >= 0).long()
    return load_balancing_loss_func(found.router_logits, 4, 2, real)


def of_samples(found: Any, documents: torch.Tensor | None) -> torch.Tensor:
    """Layer by layer and sample by sample, in plain loops; weighed by the tokens that have a next one."""
    total, followed = torch.zeros(()), 0
    for sample in range(BATCH):
        real = torch.ones(LENGTH, dtype=torch.bool) if documents is None else documents[sample] >= 0
        pairs = [(real[i] and real[i + 1]).item() for i in range(LENGTH - 1)]
        if documents is not None:
            pairs = [pair and bool(documents[sample, i] == documents[sample, i + 1]) for i, pair in enumerate(pairs)]
        followed += sum(pairs)
        for logits in found.router_logits:
            scores = logits.view(BATCH, LENGTH, 4)[sample][real].softmax(dim=-1)
            chosen = scores.topk(2).indices
            share = torch.stack([(chosen == expert).sum() / len(scores) for expert in range(4)])
            total = total + sum(pairs) * 4 * (share * scores.mean(dim=0)).sum()
    return total / followed


def mean_loss(logits: torch.Tensor, tokens: torch.Tensor, documents: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    targets = next_tokens(tokens, documents)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return loss, int((targets >= 0).sum())


def norm_of(model: torch.nn.Module) -> float:
    return float(torch.nn.utils.get_total_norm([w.grad for w in model.parameters() if w.grad is not None]))


@pytest.mark.parametrize("shown", ["whole", "padded"])
@pytest.mark.parametrize("name", BALANCED)
@pytest.mark.parametrize(("balance", "reference"), [("batch", pooled), ("sample", of_samples)])
def test_training_as_transformers(
    balance: Any, reference: Callable[..., torch.Tensor], name: str, shown: Any, tmp_path: Path
) -> None:
    """Five steps of AdamW: the cross entropy, and the norm of all gradients with those of the balance loss."""
    model, plan = plan_of("micro_batches=1", BALANCED[name])
    part = apply(model, plan, seed=7, balance=balance)
    write_weights(model, build(model, seed=7), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").train()
    ours, other = optimizer_of(part.parameters()), optimizer_of(theirs.parameters())
    for step, (tokens, documents) in enumerate(batches(shown, 5)):
        ours.zero_grad()
        other.zero_grad()
        real = None if documents is None else (documents >= 0).long()
        found = theirs(tokens, attention_mask=real, output_router_logits=True)
        loss, count = mean_loss(found.logits, tokens, documents)
        loss.backward(retain_graph=True)
        alone = norm_of(theirs)
        other.zero_grad()
        (loss + WEIGHT * reference(found, documents)).backward()
        mine = part.step(part.micro_batches(tokens, documents, step), float(count))
        assert mine.loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert float(part.copies.norm()) == pytest.approx(norm_of(theirs), rel=1e-5)
        assert norm_of(theirs) != pytest.approx(alone, rel=1e-3)  # the balance loss is a part of it
        ours.step()
        other.step()


def norms(table: str, config: dict[str, Any], shown: Any, balance: Any) -> list[float]:
    """The norms of all gradients in three steps."""
    model, plan = plan_of(table, config)
    part = apply(model, plan, seed=7, groups=GROUPS, balance=balance)
    optimizer, found = optimizer_of(part.parameters()), []
    for step, (tokens, documents) in enumerate(batches(shown)):
        optimizer.zero_grad()
        part.step(part.micro_batches(tokens, documents, step), float(tokens.numel()))
        found.append(float(part.copies.norm()))
        optimizer.step()
    return found


def test_micro_batches_change_nothing() -> None:
    expected = norms("micro_batches=1", BALANCED["qwen3-moe"], "packed", "sample")
    for count in (2, 4, 8):
        found = norms(f"micro_batches={count}", BALANCED["qwen3-moe"], "packed", "sample")
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "table",
    ["dp=2,zero=3,recompute=full", "tp=2,sp=true,ulysses=2", "tp=2,sp=false,ring=2,ep=2", "dp=2,tp=2,sp=false,ep=2"],
)
def test_the_loss_of_a_whole_batch_under_plans_that_do_not_cut_it(table: str) -> None:
    expected = norms("micro_batches=1", BALANCED["mixtral"], "padded", "batch")
    world = world_of(plan_of(table, BALANCED["mixtral"])[1])
    for found in pool(world).run(norms, f"{table},micro_batches=1", BALANCED["mixtral"], "padded", "batch"):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("table", ["micro_batches=2", "micro_batches=1,pp=2", TWO_PIPELINES])
def test_the_loss_of_a_whole_batch_is_refused_where_a_plan_cuts_it(table: str | dict[str, Any]) -> None:
    model, plan = plan_of(table, BALANCED["mixtral"])
    with pytest.raises(InputError, match=r"--balance: .*depend on the plan.*valid: sample, or a plan of one pipeline"):
        apply(model, plan, balance="batch")
    run = Training(steps=1, balance="batch")
    with pytest.raises(InputError, match="--balance"):
        check(plan.job, plan, run)


def corrected(table: str) -> torch.Tensor:
    """The routers' corrections after a step under a plan."""
    model, plan = plan_of(table, CONFIGS["deepseek-v3"])
    part = apply(model, plan, seed=7, groups=GROUPS)
    tokens, _ = batches("whole")[0]
    part.step(part.micro_batches(tokens), tokens.numel())
    part.correct_routers(0.25)
    return part.spans[0].decoder.layer("block.1.moe").router.correction


def test_routers_are_corrected_by_what_experts_got_under_any_plan() -> None:
    decoder = build(mw.Model.from_config(CONFIGS["deepseek-v3"]), seed=7)
    got: list[torch.Tensor] = []
    router = decoder.layer("block.1.moe").router
    router.register_forward_hook(lambda _, __, out: got.append(out[1]))
    decoder(batches("whole")[0][0])
    rows = torch.tensor([float((got[0] == expert).sum()) for expert in range(8)])
    expected = 0.25 * (rows.mean() - rows).sign()
    assert expected.abs().sum() > 0
    for table, world in (("dp=1", 1), ("dp=2,ep=2", 2), ("tp=2,sp=true,ep=2", 2), ("dp=2,zero=3,recompute=full", 2)):
        for found in pool(world).run(corrected, table):
            torch.testing.assert_close(found, expected)


def test_a_layer_that_is_run_again_counts_its_rows_once() -> None:
    config = CONFIGS["deepseek-v3"]
    tokens, documents = batches("padded")[0]
    assert documents is not None
    for how in ("none", "full"):
        part = apply(*plan_of(f"micro_batches=2,recompute={how}", config), seed=7)
        part.step(part.micro_batches(tokens, documents), float(tokens.numel()))
        load = part.spans[0].decoder.layer("block.1.moe").router.load
        assert int(load.sum()) == int((documents >= 0).sum()) * config["num_experts_per_tok"]


def test_rows_that_fill_up_a_tensor_parallel_line_belong_to_no_sample() -> None:
    documents = torch.tensor([[0, 0, 1, -1, -1]])
    found = []
    for rank in range(4):
        mesh = SpanMesh(tp=AxisGroup(4, rank))
        found.append(Context.of(torch.zeros(1, 5), documents, mesh).samples_of_rows().tolist())
    assert found == [[0, 0], [0, -1], [-1, -1], [-1, -1]]
