"""Random plans by number, and training under them: losses and norms of all gradients of five steps."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import torch

import meshwright as mw
from meshwright.errors import PlanError
from meshwright.plans.spans import layers_of
from meshwright.run.parallel.apply import apply
from tests.run.families import CONFIGS
from tests.run.parity import GROUPS, Batch, Shown, optimizer_of
from tests.run.plans import pipeline, span, stage
from tests.run.pool import pool

BATCH, LENGTH, STEPS = 12, 24, 5
_DEEP = {"num_hidden_layers": 4}
_BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 2.0}
_DROPPED = {"attention_dropout": 0.1}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2, dropout": {**CONFIGS["gpt2-deep"], "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "llama, dropout": {**CONFIGS["llama-deep"], **_DROPPED},
    "llama, tied": CONFIGS["tied-deep"],
    "mistral, dropout": {**CONFIGS["mistral"], **_DEEP, **_DROPPED},
    "mixtral, balance, dropout": {**CONFIGS["mixtral"], **_DEEP, **_BALANCED, **_DROPPED},
    "qwen2-moe, balance": {**CONFIGS["qwen2-moe"], **_DEEP, **_BALANCED},
    "qwen3-moe, balance": {**CONFIGS["qwen3-moe"], **_DEEP, **_BALANCED},
    "deepseek-v3, dropout": {**CONFIGS["deepseek-v3"], **_DEEP, **_DROPPED},
}
SHOWN: list[Shown] = ["whole", "packed", "padded"]
_SCHEDULES = [
    (1, "1f1b", 1), (1, "gpipe", 1), (2, "1f1b", 1), (2, "gpipe", 1), (2, "zero-bubble", 1), (4, "1f1b", 1),
    (4, "interleaved", 2), (4, "zero-bubble", 2), (4, "zbv", 2), (4, "dualpipev", 2),
]  # fmt: skip
_CUTS = ["embed..block.0", "block.1", "block.2", "block.3..head"]


def drawn(seed: int) -> tuple[str, Shown, dict[str, Any], int]:
    """Return a family, what it is shown, a plan that keeps all rules, and how many were drawn that break one."""
    random = Random(seed)
    name, shown, world = random.choice(list(FAMILIES)), random.choice(SHOWN), 1 + seed % 8
    model = mw.Model.from_config(FAMILIES[name])
    for refused in range(10_000):
        table = _plan(random, model, world)
        try:
            plan_of(table, FAMILIES[name])
        except PlanError:
            continue
        return name, shown, table, refused
    raise AssertionError(f"no plan for {world} devices keeps all rules")


def _plan(random: Random, model: mw.Model, world: int) -> dict[str, Any]:
    few = random.randint(1, world - 1) if world > 1 and random.random() < 0.2 else 0
    parts = [(0, few, 4), (few, world - few, 8)] if few else [(0, world, BATCH)]
    found = {"world": world, "pipelines": [_pipeline(random, model, *part) for part in parts]}
    chunks = random.choice([1, 1, 1, 2])
    return found | ({"overlap": {"tensor_chunks": chunks}} if chunks > 1 else {})


def _pipeline(random: Random, model: mw.Model, first: int, devices: int, batch: int) -> dict[str, Any]:
    count, name, virtual = random.choice([one for one in _SCHEDULES if one[0] // one[2] <= devices])
    groups = count // virtual
    ends = [first, *sorted(random.sample(range(first + 1, first + devices), groups - 1)), first + devices]
    micro_batches = random.choice([n for n in (1, 2, 3, 4, 6) if batch % n == 0])
    stages = []
    for s in range(count):
        group = (s if s < groups else 2 * groups - 1 - s) if name in ("zbv", "dualpipev") else s % groups
        layers = _CUTS[s * 4 // count : (s + 1) * 4 // count]
        cut = random.randint(0, len(layers) - 1)
        some = [part for part in (layers[:cut], layers[cut:]) if part]
        size = ends[group + 1] - ends[group]
        spans = [_span(random, model, part, size, batch // micro_batches) for part in some]
        at = f"{ends[group]}-{ends[group + 1] - 1}" if size > 1 else str(ends[group])
        stages.append(stage(at, *spans))
    return pipeline(*stages, batch=batch, micro_batches=micro_batches, schedule={"name": name, "virtual": virtual})


def _span(random: Random, model: mw.Model, layers: list[str], devices: int, samples: int) -> dict[str, Any]:
    left, found = devices, {}
    for axis in random.sample(["tp", "ulysses", "ring"], 3):
        found[axis] = random.choice([d for d in range(1, left + 1) if left % d == 0])
        left //= found[axis]
    replicas = left * found["ulysses"] * found["ring"]
    found |= {"dp": left, "order": random.sample(["tp", "ulysses", "ring", "dp"], 4)}
    found |= {"sp": found["tp"] > 1 and random.random() < 0.5, "zero": random.choice([0, 1, 2, 3])}
    found["zero_group"] = random.choice([0, *(d for d in range(1, replicas) if found["zero"] and replicas % d == 0)])
    found["ep"] = random.choice([1, *(d for d in (2, 4) if devices % d == 0)])
    found["etp"] = random.choice([1, 1, *(d for d in (2,) if devices % (d * found["ep"]) == 0)])
    if left > 1 and samples >= left and random.random() < 0.3:
        cuts = [0, *sorted(random.sample(range(1, samples), left - 1)), samples]
        found["shares"] = [high - low for low, high in pairwise(cuts)]
    named = f"{layers[0].split('..')[0]}..{layers[-1].split('..')[-1]}"
    names = sorted({name for layer in layers_of(model, named) for name in layer.op_names})
    some = tuple(random.sample(names, random.randint(1, len(names))))
    found["recompute"] = random.choice(["none", "selective", "full", some])
    return span(named, **found)


def plan_of(table: dict[str, Any], config: dict[str, Any]) -> tuple[mw.Model, mw.Plan]:
    """Return the model and the plan that a table is of."""
    model, short = mw.Model.from_config(config), dict(table)
    cluster = mw.Cluster.preset(f"{short.pop('world')}xh100")
    job = mw.Job(model, cluster, global_batch=BATCH, seq_len=LENGTH, precision="fp32")
    return model, mw.Plan.of({"format": "meshwright-plan", "version": 1, "job": job.written(), **short}, job)


def batches(shown: Shown) -> list[Batch]:
    """Return random tokens; packed: documents of random lengths in them; padded: one, and nothing after its end."""
    stream, found = torch.Generator().manual_seed(11), []
    for _ in range(STEPS):
        tokens = torch.randint(0, 64, (BATCH, LENGTH), generator=stream)
        ends = torch.rand((BATCH, LENGTH), generator=stream) < 0.15
        inside = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (BATCH, 1), generator=stream)
        documents = {"whole": None, "packed": ends.cumsum(dim=1), "padded": inside.long() - 1}
        found.append((tokens, documents[shown]))
    return found


def trained(table: dict[str, Any], config: dict[str, Any], shown: Shown) -> list[float]:
    """Return the losses of five steps of AdamW, then the norms of all gradients."""
    model, plan = plan_of(table, config)
    part = apply(model, plan, seed=7, groups=GROUPS)
    optimizer, losses, norms = optimizer_of(part.parameters()), [], []
    for step, (tokens, documents) in enumerate(batches(shown)):
        optimizer.zero_grad()
        losses.append(part.step(part.micro_batches(tokens, documents, step), float(tokens.numel())).loss)
        norms.append(float(part.copies.norm()))
        optimizer.step()
        part.correct_routers()
    return losses + norms


@cache
def by_one_process(name: str, shown: Shown) -> list[float]:
    """Return the same of one process and one micro-batch."""
    table = {"world": 1, "pipelines": [pipeline(stage("0", span("embed..head")), batch=BATCH, micro_batches=1)]}
    (found,) = pool(1).run(trained, table, FAMILIES[name], shown)
    return list(found)


def deviation(seed: int) -> float:
    """Return how far a drawn plan's numbers are from those of one process, as a part of them."""
    name, shown, table, _ = drawn(seed)
    expected = by_one_process(name, shown)
    return max(
        abs(value - one) / abs(one)
        for found in pool(table["world"]).run(trained, table, FAMILIES[name], shown)
        for value, one in zip(found, expected, strict=True)
    )
