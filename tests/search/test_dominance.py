"""Grids that are left out are beaten by one that stays, in time and memory of every layer, whatever is repeated."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

import meshwright as mw
from meshwright.cost.runtime import RUNTIMES
from meshwright.search.bounds.dominance import traits_of
from meshwright.search.bounds.prices import prices
from meshwright.search.exact import candidate_tables
from meshwright.search.exact.candidate_tables import Frame, framed
from meshwright.search.exact.solve import Search
from meshwright.search.space.activation_modes import recomputes
from meshwright.search.space.candidates import Choices, folded, inside, with_states

CASES = [
    ("llama3-8b", "2x8xh100", 16, "meshwright"), ("llama3-8b", "4x8xa100-80gb", 48, "megatron-2021"),
    ("gpt2-xl", "2x4xtitan-xp", 16, "meshwright"), ("t5-3b", "8xv100-32gb", 16, "meshwright"),
    ("qwen3-30b-a3b", "2x8xh100", 16, "meshwright"), ("deepseek-v3", "4x8xh800", 32, "megatron"),
    ("mixtral-8x7b", "8xrtx-4090", 8, "torchtitan"), ("llama3-70b", "2x72xgb200", 144, "nemo"),
]  # fmt: skip


def searched(model: str, cluster: str, batch: int, runtime: str) -> Search:
    described = mw.Model.preset(model)
    length = described.default_seq_len()
    job = mw.Job(described, mw.Cluster.preset(cluster), global_batch=batch, seq_len=length)
    return Search(job, RUNTIMES[runtime])


def rows_of(choices: Choices) -> list[tuple[int, ...]]:
    g = choices.grids
    parts = (g.tp, g.sp, g.ulysses, g.ring, g.dp, g.order, choices.samples)
    return list(zip(*(part.tolist() for part in parts), strict=True))


def both(search: Search) -> tuple[Choices, np.ndarray]:
    """Every candidate, and whether it stays."""
    job, chain, site, limits = search.job, search.chain, search.site, search.limits
    kept = set(rows_of(framed(job, chain, site, limits, recomputes(search.modes)).choices))
    with mock.patch.object(candidate_tables, "needless", return_value={}):
        every = candidate_tables._candidates(job, site, limits)
    return every, np.array([row in kept for row in rows_of(every)])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]} {case[3]}")
def test_what_is_left_out_is_beaten(case: tuple[str, str, int, str]) -> None:
    search = searched(*case)
    every, stays = both(search)
    frame = Frame.of(search.job, search.chain, search.site, every)
    traits = traits_of(search.job, search.chain, frame.unique, search.site, recomputes(search.modes))[:, frame.back]
    g, spans = every.grids, [tier.span for tier in search.site.fabric.tiers[:-1]]
    lie = [inside(g, axes, span) for axes in (("tp",), ("ulysses", "ring", "dp")) for span in spans]
    alike = np.stack([g.devices, every.micro_batch, g.tp, g.sp, *lie])
    assert 0 < stays.sum() < len(every)
    for row in np.flatnonzero(~stays):
        rivals = np.flatnonzero(stays & (alike == alike[:, [row]]).all(axis=0))
        better = traits[:, rivals] <= traits[:, [row]] + 1e-9 * np.abs(traits[:, [row]])
        assert better.all(axis=0).any(), rows_of(every)[row]


@pytest.mark.parametrize("case", CASES[3:6], ids=lambda case: f"{case[0]} {case[1]} {case[3]}")
def test_a_beaten_grid_is_beaten_at_every_level_in_every_mode(case: tuple[str, str, int, str]) -> None:
    """Prices of whole choices, experts folded and states sharded or away, of which the traits say nothing."""
    search = searched(*case)
    every, stays = both(search)
    rng = np.random.default_rng(0)
    some = rng.permutation(np.flatnonzero(~stays))[:40]
    g, found = every.grids, 0
    for row in some:
        mine = (g.devices == g.devices[row]) & (every.micro_batch == every.micro_batch[row])
        rivals = every.take(np.flatnonzero(stays & mine & (g.tp == g.tp[row]) & (g.sp == g.sp[row])))
        assert len(rivals)
        found += _beaten(search, every.take(np.array([row])), rivals)
    assert found == len(some)


def _beaten(search: Search, one: Choices, rivals: Choices) -> bool:
    """Whether one rival is as good as a choice at every ZeRO level and offload, under every folding and mode."""
    tables_ = []
    for part in (one, rivals):
        full = folded(search.job, search.chain.sorts, part, search.site.fabric, search.limits)
        states, _ = with_states(full, search.job, search.limits)
        tables_.append((states, prices(search.job, search.chain, states, search.modes, search.site)))
    (ours, mine), (theirs, other) = tables_

    def key(c: Choices) -> list[tuple[float, ...]]:
        parts = (c.grids.ep, c.grids.etp, c.zero, c.zero_group, c.optimizer_away, c.parameters_away)
        return list(zip(*(part.tolist() for part in parts), strict=True))

    def costs(p: object, row: int) -> np.ndarray:
        names = ("forward", "backward", "kept", "parked", "moment", "states", "host", "movable", "reduce", "gather")
        names += ("once", "update", "update_away", "passed_on", "received", "buffers")
        return np.concatenate([np.ravel(getattr(p, name)[..., row]) for name in names])

    grid_of = rows_of(theirs)
    for rival in set(grid_of):
        rows = {k: i for i, (k, grid) in enumerate(zip(key(theirs), grid_of, strict=True)) if grid == rival}
        if all(
            k in rows and (costs(other, rows[k]) <= costs(mine, i) * (1 + 1e-9) + 1e-15).all()
            for i, k in enumerate(key(ours))
        ):
            return True
    return False
