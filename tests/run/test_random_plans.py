"""Random plans train to the losses and gradient norms of one process, with dropout and the balance loss on."""

from __future__ import annotations

import pytest

from tests.run.draws import deviation

# Draws that take little time; among them are ones that notice each cut of samples, heads and tokens if it is forgotten.
QUICK = (1001, 1002, 1007, 1010, 1011, 1019, 1035, 1036, 1038, 1039, 1041, 1043, 1045, 1050, 1058)


@pytest.mark.parametrize("seed", QUICK)
def test_a_random_plan(seed: int) -> None:
    assert deviation(seed) < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(120))
def test_one_of_many_random_plans(seed: int) -> None:
    assert deviation(seed) < 1e-5
