"""Cuts of a chain: every family gives stages that hold at least a layer, and that cut only where that is allowed."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import numpy as np
import pytest

import meshwright as mw
from meshwright.search.space.cuts import balanced, even, shared_out


def chain(random: Random) -> tuple[np.ndarray, tuple[int, ...], np.ndarray]:
    """Weights of layers, the group of every stage, and where cuts may stand: as few as there can be, or more."""
    groups, virtual = random.randint(1, 4), random.choice([1, 2, 2, 3])
    stages = max(groups * virtual, 2)
    count = stages + random.randint(0, 10)
    homes = tuple(s % groups if virtual != 2 else min(s, stages - 1 - s) for s in range(stages))
    allowed = sorted(random.sample(range(1, count), random.randint(stages - 1, count - 1)))
    weights = np.array([random.choice([0.05, 0.5, 1, 1, 1, 3]) for _ in range(count)])
    return weights, homes, np.array(allowed)


@pytest.mark.parametrize("seed", range(400))
def test_every_stage_holds_something(seed: int) -> None:
    random = Random(seed)
    weights, homes, allowed = chain(random)
    total = np.concatenate([[0.0], np.cumsum(weights)])
    shares = np.array([random.uniform(0.1, 1) for _ in range(max(homes) + 1)])
    found = balanced(weights, homes, allowed, allowed[::2])
    found += [shared_out(total, homes, allowed, part, shares / shares.sum()) for part in (0.3, 1.0, 3.0)]
    for cuts in found:
        assert (cuts[0], cuts[-1], len(cuts)) == (0, len(weights), len(homes) + 1)
        assert all(last > first for first, last in pairwise(cuts))
        assert set(cuts[1:-1]) <= set(allowed.tolist())


@pytest.mark.parametrize("seed", range(60))
def test_the_longest_stage_is_as_short_as_can_be(seed: int) -> None:
    """One stage per group, against every way to cut the chain."""
    random = Random(seed)
    weights = np.array([random.choice([0.5, 1, 1, 1, 3]) for _ in range(random.randint(9, 12))])
    stages = random.randint(2, 4)
    allowed = np.arange(1, len(weights))
    found = balanced(weights, tuple(range(stages)), allowed, allowed[::2])
    every = [(0, *some, len(weights)) for some in combinations(allowed.tolist(), stages - 1)]
    least = min(max(weights[a:b].sum() for a, b in pairwise(cuts)) for cuts in every)
    assert min(max(weights[a:b].sum() for a, b in pairwise(cuts)) for cuts in found) <= least + 0.05


def test_even_stages_hold_as_many_blocks() -> None:
    model = mw.Model.preset("llama3-8b")
    (cuts,) = even(model, 4)
    blocks = [{layer.block for layer in model.layers[a:b] if layer.block} for a, b in pairwise(cuts)]
    assert [len(some) for some in blocks] == [8, 8, 8, 8]
    assert even(model, 5) == []
