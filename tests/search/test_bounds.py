"""No bound is above the plan it speaks of: every bound against settling and simulating the same candidate."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

import meshwright as mw
from meshwright.cost.runtime import RUNTIMES
from meshwright.search.bounds.layer_times import timed
from meshwright.search.bounds.lower_bounds import least_seconds, plain_seconds, pooled_extra, quick_seconds
from meshwright.search.bounds.pipeline_shapes import Shape
from meshwright.search.bounds.prices import Prices, prices
from meshwright.search.bounds.pruning import Screen, averaged, holdable, least_away, least_end, updates
from meshwright.search.exact.evaluate import best_of
from meshwright.search.exact.solve import Search
from meshwright.search.space.candidates import Choices, bare
from meshwright.search.space.schedules import schedules

EXACT = 1 + 1e-9
CASES = [
    ("llama3-8b", "2x4xa100-40gb", 16, 4096), ("gpt3-13b", "2x8xv100-32gb", 32, 2048), ("t5-3b", "8xa100-40gb", 64, 512),
    ("mixtral-8x7b", "8x8xh100", 128, 4096), ("deepseek-v2-lite", "4x8xa100-80gb", 64, 4096),
    ("swin-huge", "8xv100-32gb", 64, 0), ("qwen3-30b-a3b", "8xh100", 32, 4096),
]  # fmt: skip


def tight(job: mw.Job, random: Random) -> mw.Job:
    """With less memory, on the devices and on the host."""
    (group,) = job.cluster.groups
    device = replace(group.device, memory=int(group.device.memory * random.choice([0.5, 0.7, 1.0])))
    host = int(group.host_memory * random.choice([0, 0.05, 0.2, 1.0]))
    return replace(job, cluster=replace(job.cluster, groups=(replace(group, device=device, host_memory=host),)))


def candidates(search: Search, random: Random) -> list[tuple[Shape, Prices]]:
    """Some pipelines with some choices of each."""
    tables, found = search._tables(), []
    for _ in range(24):
        table = random.choice(tables)
        groups = random.choice([g for g in (1, 2, 4, 8) if g <= table.groups])
        every = list(schedules(search._names, search.limits, groups, table.micro_batches, len(search.places) + 1))
        if not every:
            continue
        shape = Shape(groups, table.size, random.choice(every), table.micro_batches)
        choices = search.choices_of(shape)
        fitting = np.flatnonzero(holdable(search.setting, choices, groups)).tolist() if len(choices) else []
        if fitting and len(search.cuts(shape)):
            rows = np.array(sorted(random.sample(fitting, min(6, len(fitting)))))
            priced = prices(search.job, search.chain, choices.take(rows), search.modes, search.site)
            found.append((shape, priced.with_relaxed(search.chain)))
    return found


def _away(search: Search, choices: Choices) -> Any:
    return least_away(search.setting, choices, search.most_groups)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("model", "cluster", "batch", "seq"), CASES)
def test_no_bound_is_above_the_truth(model: str, cluster: str, batch: int, seq: int, seed: int) -> None:
    random = Random(f"{model} {seed}")
    job = mw.Job(mw.Model.preset(model), mw.Cluster.preset(cluster), global_batch=batch, seq_len=seq)
    search = Search(tight(job, random), RUNTIMES[random.choice(["meshwright", "megatron"])])
    setting, seen = search.setting, 0
    for shape, table in candidates(search, random):
        cuts, every = search.cuts(shape), np.arange(len(table.choices))
        screen, choices = Screen(setting, table), table.choices
        grids = bare(choices.grids, choices.samples)
        least = updates(setting, search.site, dataclasses.replace(choices, optimizer_away=_away(search, choices)))
        work = shape.micro_batches * screen.work + least
        end = least_end(setting, search.site, grids, search.most_groups)
        early = Screen(setting, timed(search.job, search.chain, grids, search.site), end)
        mean = averaged(setting, search._cutter, shape, screen.total(shape, every), table.columns)
        extra, after = pooled_extra(setting, shape, cuts, table)
        bounds = {
            "no ZeRO level, nothing on the host": np.broadcast_to(early.least(shape, every), extra.shape),
            "all work, and updates": np.broadcast_to(setting.total(shape, work / shape.groups), extra.shape),
            "one micro-batch, or the mean group": np.broadcast_to(screen.least(shape, every), extra.shape),
            "the mean group, and memory": mean + setting.longer(shape, extra),
            "bubble": quick_seconds(setting, shape, cuts, table.columns),
            "bubble and memory": plain_seconds(setting, shape, cuts, table, after),
            "memory of each group": least_seconds(setting, shape, cuts, table, float("inf")),
        }
        for q in random.sample(range(len(cuts)), min(3, len(cuts))):
            for row in every:
                found = best_of(setting, shape, cuts.cuts[q], table.take(every[row : row + 1]), search.modes, np.inf)
                seen += found is not None
                for name, bound in bounds.items() if found else []:
                    assert bound[q, row] <= found.seconds * EXACT, (
                        name,
                        shape,
                        table.choices.take(every[row : row + 1]),
                    )
    assert seen
