"""Random plans train to the losses and gradient norms of one process, with dropout and the balance loss on."""

from __future__ import annotations

import pytest

from tests.run.draws import deviation


@pytest.mark.parametrize("seed", range(1000, 1015))
def test_a_random_plan(seed: int) -> None:
    assert deviation(seed) < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(120))
def test_one_of_many_random_plans(seed: int) -> None:
    assert deviation(seed) < 1e-5
