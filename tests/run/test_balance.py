"""The loss that keeps experts equally busy."""

from __future__ import annotations

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import meshwright as mw
from meshwright.run.apply import apply
from meshwright.run.collectives import ALONE
from meshwright.run.models import Context, build
from meshwright.run.models.balance import balance_loss
from meshwright.run.weights import write_weights
from tests.run.families import CONFIGS
from tests.run.parity import GROUPS, batches, plan_of
from tests.run.pool import pool


def test_the_loss_and_gradients_of_transformers(tmp_path: object) -> None:
    """Of one layer: theirs pools the tokens of all layers, ours is of each."""
    config = {**CONFIGS["mixtral"], "num_hidden_layers": 1, "output_router_logits": True, "router_aux_loss_coef": 0.7}
    model = mw.Model.from_config(config)
    decoder = build(model, seed=3)
    write_weights(model, decoder, str(tmp_path))
    theirs = MixtralForCausalLM.from_pretrained(str(tmp_path))
    assert isinstance(theirs.config, MixtralConfig)
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    found = theirs(tokens, labels=tokens)
    found.loss.backward()
    logits = decoder(tokens, Context.of(tokens, divisor=tokens.numel()))
    main = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    main.backward()
    torch.testing.assert_close(main + 0.7 * found.aux_loss.detach(), found.loss, atol=1e-5, rtol=1e-5)
    ours = decoder.layer("block.0.moe").router.weight.grad
    gate = next(weight for name, weight in theirs.named_parameters() if name.endswith("gate.weight"))
    assert ours.abs().max() > 1e-3
    torch.testing.assert_close(ours, gate.grad, atol=1e-6, rtol=1e-4)


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


def test_value_by_hand() -> None:
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]])
    experts = torch.tensor([[0, 1], [0, 1], [2, 0]])
    rows, means = [3 / 3, 2 / 3, 1 / 3], [1.4 / 3, 0.6 / 3, 1.0 / 3]
    by_hand = 3 * sum(a * b for a, b in zip(rows, means, strict=True))
    torch.testing.assert_close(balance_loss(scores, experts, ALONE) / 3, torch.tensor(by_hand))
