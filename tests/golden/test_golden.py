"""Answers of the command line are the kept ones: some of each kind here, all 300 at night."""

from __future__ import annotations

import pytest

from tests.golden.draws import COUNT, question
from tests.golden.record import ask, compare, kept_answers

SOME = (2, 25, 61, 90, 121, 140, 169, 181, 199, 215, 236, 259, 273)


@pytest.mark.parametrize(
    "number", [n if n in SOME else pytest.param(n, marks=pytest.mark.nightly) for n in range(COUNT)]
)
def test_the_answer_is_the_kept_one(number: int) -> None:
    assert compare(number, kept_answers()[number], ask(question(number))) == []
