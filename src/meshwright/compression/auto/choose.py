"""Choose a strategy for every gradient by simulation, to minimise the time until the same loss is reached.

With few units and strategies every combination is tried. Otherwise the search starts from the best uniform strategies,
and changes one unit after the other as long as that helps (tests compare this with trying everything).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product

from meshwright.compression.auto.inputs import Facts, Unit, Way
from meshwright.compression.auto.simulation import Strand, Times, simulate

EVERYTHING = 256  # combinations up to which all are tried
STARTS = 4  # uniform strategies from which changes are tried
WIDE = 6  # strategies tried for each unit: the best uniform ones

PAYS = 0.1  # share of the time that 16 bits must save; otherwise gradients stay uncompressed
PAYS_LOSSY = 1 / 3  # share that fewer bits must save
BLIND = 2.0  # maximum slow-down of the first steps, relative to the fastest strategy
SIMULATIONS = 1500  # maximum for one decision

Costs = Callable[[Way, tuple[tuple[int, ...], ...]], Sequence[Strand]]  # for adjacent gradients of these shapes


@dataclass(frozen=True)
class Decision:
    """A strategy for every unit, with its predicted times."""

    ways: tuple[Way, ...]
    times: Times
    steps: float  # steps to the same loss, relative to exact sums

    @property
    def price(self) -> float:
        """Seconds of training that replace one exact step."""
        return self.times.step * self.steps


def decide(
    facts: Facts,
    ways: Sequence[Way],
    costs: Costs,
    allowed: Mapping[Unit, Sequence[Way]] | None = None,
    simulations: int = SIMULATIONS,
) -> Decision:
    """Return the best strategy for every unit.

    - `allowed` restricts the strategies of some units.
    - `simulations` is the maximum number of simulations.

    Gradients stay uncompressed unless 16 bits save a tenth of the time, and keep 16 bits unless fewer save a third.
    """
    best = _best(facts, ways, costs, allowed, simulations)
    exact = [way for way in ways if way.exact]
    if not exact:
        return best
    plain = priced(facts, exact[:1] * len(facts.units), costs)
    near = [way for way in ways if way.near]
    kept = {unit: [way for way in some if way.near] for unit, some in allowed.items()} if allowed else None
    return worth(plain, _best(facts, near, costs, kept, simulations), best)


def single(
    facts: Facts, ways: Sequence[Way], costs: Costs, allowed: Mapping[Unit, Sequence[Way]] | None = None
) -> Decision:
    """Return the best single strategy for all units (except where it is not allowed), by the rules of `decide`."""
    space = _space(facts, ways, allowed)
    found = [_uniform(facts, way, space, costs) for way in ways]
    best = min((one for one, _ in found), key=lambda one: one.price)
    plain = [one for one, way in found if way.exact]
    if not plain:
        return best
    nearly = min((one for one, _ in found if all(way.near for way in one.ways)), key=lambda one: one.price)
    return worth(plain[0], nearly, best)


def blind(
    facts: Facts, ways: Sequence[Way], costs: Costs, allowed: Mapping[Unit, Sequence[Way]] | None = None
) -> Decision:
    """Return one strategy for all units while the computing time is unknown, so that the link's time counts less.

    Of the strategies that take at most `BLIND` times as long as the fastest, it is the one that needs the fewest steps.
    An optimizer remembers the errors of the first steps for long.
    """
    space = _space(facts, ways, allowed)
    found = [_uniform(facts, way, space, costs)[0] for way in ways]
    fastest = min(one.times.step for one in found)
    return min((one for one in found if one.times.step <= BLIND * fastest), key=lambda one: (one.steps, one.times.step))


def worth(plain: Decision, nearly: Decision, best: Decision) -> Decision:
    """Return the decision worth taking out of exact sums, the best with at least 16 bits, and the best of all."""
    safe = nearly if nearly.price < plain.price * (1 - PAYS) else plain
    return best if best.price < safe.price * (1 - PAYS_LOSSY) else safe


def _best(
    facts: Facts,
    ways: Sequence[Way],
    costs: Costs,
    allowed: Mapping[Unit, Sequence[Way]] | None,
    simulations: int,
) -> Decision:
    space = _space(facts, ways, allowed)
    combinations = 1
    for some in space:
        combinations *= len(some)
    if combinations <= EVERYTHING:
        tried = (priced(facts, chosen, costs) for chosen in product(*space))
        return min(tried, key=lambda one: one.price)
    uniform = [_uniform(facts, way, space, costs) for way in ways]
    uniform.sort(key=lambda one: one[0].price)
    narrow = [way for _, way in uniform[:WIDE]]
    space = [tuple(way for way in narrow if way in some) or some for some in space]
    each = simulations // STARTS
    improved = (_improved(facts, start, space, costs, each) for start, _ in uniform[:STARTS])
    return min(improved, key=lambda one: one.price)


def priced(facts: Facts, chosen: Sequence[Way], costs: Costs) -> Decision:
    """Return the prediction for given strategies."""
    strands: list[list[Strand]] = [[] for _ in facts.ready]
    pairs = zip(facts.units, chosen, strict=True)
    for (bucket, way), same in groupby(pairs, key=lambda pair: (pair[0].bucket, pair[1])):
        strands[bucket] += costs(way, tuple(shape for unit, _ in same for shape in unit.shapes))
    return Decision(tuple(chosen), simulate(facts.ready, strands, facts.link, facts.cores), steps_of(facts, chosen))


def steps_of(facts: Facts, chosen: Sequence[Way]) -> float:
    """Return the steps needed relative to exact sums: a mean over strategies, weighted by their numbers."""
    numbers = sum(unit.numbers for unit in facts.units) or 1
    return sum(unit.numbers * way.steps for unit, way in zip(facts.units, chosen, strict=True)) / numbers


def _space(facts: Facts, ways: Sequence[Way], allowed: Mapping[Unit, Sequence[Way]] | None) -> list[tuple[Way, ...]]:
    """Return the possible strategies of each unit."""
    return [tuple(allowed.get(unit, ways)) if allowed else tuple(ways) for unit in facts.units]


def _uniform(facts: Facts, way: Way, space: Sequence[Sequence[Way]], costs: Costs) -> tuple[Decision, Way]:
    chosen = [way if way in some else some[0] for some in space]
    return priced(facts, chosen, costs), way


def _improved(
    facts: Facts, start: Decision, space: Sequence[Sequence[Way]], costs: Costs, simulations: int
) -> Decision:
    best, unchanged, place = start, 0, 0
    while unchanged < len(space) and simulations > 0:
        for way in space[place]:
            if way == best.ways[place]:
                continue
            simulations -= 1
            other = priced(facts, (*best.ways[:place], way, *best.ways[place + 1 :]), costs)
            if other.price < best.price * (1 - 1e-6):
                best, unchanged = other, 0
        unchanged, place = unchanged + 1, (place + 1) % len(space)
    return best
