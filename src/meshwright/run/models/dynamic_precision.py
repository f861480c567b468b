"""Precision of every matrix product as needed: up if a type loses too much, down if a coarser one would do.

Every few steps one step is watched: the rounding errors of inputs, weights and gradients, in a product's type and in
the next coarser one. Sums over all ranks are the same on each, and so are the decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright.errors import InputError
from meshwright.run.models.linear import Product
from meshwright.run.precision.matmul import LADDER, has_float8
from meshwright.run.precision.rounding import SUMS, Rounding, Watch

EVERY = 16  # steps between two watched ones
CHECKS = 3  # consecutive checks that must agree before a type changes
# Below the first a type is fine enough, above the second too coarse; in between nothing changes.
LOST = (0.01, 0.05)
ERROR = (0.3, 0.5)  # rounding without lost values gives 0.2


@dataclass
class Level:
    """Type of one product. Each move up doubles the wait before the next move down, so that it does not oscillate.

    >>> level = Level("fp8")
    >>> [level.judge(Rounding(lost=0.5), None, healthy=True) for _ in range(3)], level.at
    ([False, False, True], 'bf16')
    """

    at: str
    bad: int = 0  # consecutive checks that found the type too coarse
    calm: int = 0  # consecutive checks that found the next coarser one fine
    patience: int = CHECKS  # calm checks needed for a move down

    def judge(self, here: Rounding, below: Rounding | None, *, healthy: bool) -> bool:
        """Return True if the type changes, given the errors of the type and of the next coarser one, if any."""
        place = LADDER.index(self.at)
        self.bad = self.bad + 1 if _high(here) and place + 1 < len(LADDER) else 0
        self.calm = self.calm + 1 if below is not None and healthy and not self.bad and _low(below) else 0
        if self.bad >= CHECKS:
            self.at, self.bad, self.patience = LADDER[place + 1], 0, 2 * self.patience
        elif self.calm >= self.patience:
            self.at, self.calm = LADDER[place - 1], 0
        return self.at != LADDER[place]


def _high(found: Rounding) -> bool:
    return found.lost > LOST[1] or found.error > ERROR[1]


def _low(found: Rounding) -> bool:
    return found.lost < LOST[0] and found.error < ERROR[0]


class Dynamic:
    """Precision of all products of a model; every rank calls the same methods at the same steps."""

    def __init__(self, products: Mapping[str, Product], start: str, coarsest: str, device: str) -> None:
        self.products, self.coarsest, self.device = products, coarsest, torch.device(device)
        every = [list(products)]
        self._together = dist.is_initialized() and dist.get_world_size() > 1
        if self._together:
            every = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(every, list(products))
        self.levels = {name: Level(start) for names in every for name in names}
        self._set()

    @staticmethod
    def of(products: Mapping[str, Product], precision: str, device: str) -> Dynamic:
        """Create levels that start at a job's precision; down to 8 bits on devices that have them."""
        start = "fp32" if precision == "tf32" else precision
        if start not in LADDER:
            raise InputError(
                f"starts at {precision}", field="--dynamic-precision", valid=f"--precision {', '.join(LADDER)}"
            )
        coarsest = "fp8" if start == "fp8" or has_float8(torch.device(device)) else "bf16"
        return Dynamic(products, start, coarsest, device)

    def before(self, step: int) -> None:
        """Watch this step if it is due."""
        if step % EVERY == 0:
            for name, product in self.products.items():
                product.watch = Watch(self._kinds(name), self.device)

    def after(self, step: int, *, healthy: bool) -> list[dict[str, str]]:
        """Return the changes after a step; nothing moves down while the loss is unhealthy."""
        if step % EVERY:
            return []
        kinds = {name: self._kinds(name) for name in self.levels}
        sums = torch.zeros(sum(map(len, kinds.values())), 3, SUMS, dtype=torch.float64, device=self.device)
        found = dict(zip(kinds, sums.split([len(some) for some in kinds.values()]), strict=True))
        for name, product in self.products.items():
            assert product.watch is not None
            found[name] += product.watch.sums
            product.watch = None
        if self._together:
            dist.all_reduce(sums)
        moved = []
        for name, level in self.levels.items():
            was, seen = level.at, {k: Rounding.of(s, k) for k, s in zip(kinds[name], found[name].cpu(), strict=True)}
            here = seen.pop(was, Rounding())
            if level.judge(here, next(iter(seen.values()), None), healthy=healthy):
                moved.append({"layer": name, "from": was, "to": level.at})
        self._set()
        return moved

    def _kinds(self, name: str) -> tuple[str, ...]:
        """Return the types to watch: the own one if it rounds, and the next coarser one if it may be chosen."""
        place = LADDER.index(self.levels[name].at)
        some = LADDER[max(place - 1, LADDER.index(self.coarsest)) : place + 1]
        return tuple(kind for kind in some if kind != LADDER[-1])

    def _set(self) -> None:
        for name, product in self.products.items():
            product.computed_in = self.levels[name].at

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {name: asdict(level) for name, level in self.levels.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.levels |= {name: Level(**state[name]) for name in self.levels if name in state}
        self._set()
