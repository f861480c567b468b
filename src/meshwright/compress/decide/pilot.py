"""Decides while training goes on: what was measured at the start is fitted again to what is seen.

At some steps all processes tell each other what they have seen (a vote: the most of each number): when buckets were ready,
how long steps and encoding took, how long a probe took on the link. The first process then decides and tells the others,
and the new choice holds from the next step on. A probe is sent when steps take other times than expected, and now and then.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from meshwright.compress.decide.choose import Decision, blind, decide, priced, single, steps_of
from meshwright.compress.decide.errors import Errors
from meshwright.compress.decide.facts import Auto, Facts, Link, Unit, Way, units
from meshwright.compress.decide.link import Submit, measured, neighbours, probe_of, probed, told
from meshwright.compress.decide.outlook import Drag, Outlook
from meshwright.compress.decide.pipeline import Strand, Times
from meshwright.compress.decide.rehearse import Rehearsal
from meshwright.compress.sync.bucket import Gradients
from meshwright.compress.sync.layout import Choice
from meshwright.compress.sync.message import Stamp
from meshwright.compress.sync.sums import Total
from meshwright.compress.sync.topology import Run
from meshwright.compress.sync.wire import Wire

_FIRST = 2  # the step of the first vote: DDP cuts its buckets anew after one
_OFF = 0.25  # part by which a step may differ from what was expected before the link is looked at
_PROBING = 0.02  # part of the time that probes may take
_BETTER = 0.1  # part by which another choice must be better: no two changes for nothing
_MIXED = 0.05  # part by which a mixture must be better than one way for all: every change of way is a message more
_TRIED = 200  # simulations of mixtures for one decision, about 0.1 s, for which all wait
_SOON = 0.05  # seconds: exact sums of a bucket that take no longer are not replaced before computing is known
_QUICK = 0.15  # seconds: ... and those of all buckets, where it is not even worth being asked for them
_APART = 2.0  # seconds between votes, where steps are shorter
_REMEMBERED = 16  # steps whose computing is remembered: some have more to do than others, such as a validation
_LOOKS = 10  # votes between looks at what codecs would lose, where there is a guard


class Pilot:
    """The decisions of one synchroniser; all processes make it, and ask it, at the same time."""

    def __init__(self, auto: Auto, wire: Wire, submit: Submit, *, feedback: bool, owned: bool = False) -> None:
        """`owned`: sums stay with the owners of their parts."""
        self.auto, self._wire, self._submit = auto, wire, submit
        self.version = 0  # of the choices
        self.history: list[Outlook] = []
        self._cores = len(os.sched_getaffinity(0)) / neighbours(wire)
        self.link: Link = measured(wire, self._cores, submit)
        self._rehearsal = Rehearsal(wire.size, feedback, owned)
        self._errors = Errors(auto) if auto.guard is not None else None
        self._ways: dict[Unit, Way] = {}
        self._pace = 1.0  # of the worker, against rehearsals
        self._priced: dict[tuple[Way, Any], list[Strand]] = {}  # at that pace
        self._drag = Drag()
        self._turned = False  # whether the link was another one at the last look
        self._probe = probe_of(self.link) if wire.size > 1 else 0  # bytes
        self._unprobed = 0.0  # seconds since the last one
        self._calm = inf  # seconds of a step, the least that were seen since then under the same choices
        self._due, self._votes_taken = _FIRST, 0
        self._now: list[tuple[Gradients, float]] = []  # buckets of this step, and what the thread had computed by then
        self._layout: tuple[Gradients, ...] = ()  # of the last step
        self._begun = (0.0, 0.0)  # computed and wall seconds when the last step had been handed over
        self._ready: deque[list[float]] = deque(maxlen=_REMEMBERED)
        self._seconds: list[float] = []
        self._seen = 0.0  # seconds of a step, at the last vote
        self._worked, self._marks = 0.0, [0.0]  # of the worker: in all, and by the end of each step since the last vote
        self._vote: Tensor | None = None
        self._pending: Future[Any] | None = None
        self._totals: dict[int, Total] = {}

    def prepare(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Rehearse what gradients of these shapes may need, before there are any."""
        if self._wire.place == 0:
            for way in self.auto.ways:
                for shape in sorted(set(shapes)):
                    self._costs(way, (shape,))

    def choices(self, place: int, gradients: Gradients, stamp: Stamp) -> list[Choice]:
        """For every gradient of a bucket."""
        own = [Unit(place, unit.shapes) for unit in units([gradients.shapes])]
        if any(unit not in self._ways for unit in own):  # nothing is known but the link
            facts = Facts((0.0,), tuple(units([gradients.shapes])), self._wire.size, self.link, self._cores)
            self._ways.update(zip(own, self._decided(facts, own, stamp).ways, strict=True))
        return [self._ways[unit].choice for unit in own for _ in unit.shapes]

    def stands_aside(self, buckets: Sequence[Gradients], stamp: Stamp) -> bool:
        """Whether exact sums are so quick that nothing else is done before computing is known."""
        every = units([one.shapes for one in buckets])
        plain = next((way for way in self.auto.ways if way.exact), None)
        if plain is None:
            return False
        quick = 0.0
        if self._wire.place == 0:
            facts = Facts((0.0,) * len(buckets), every, self._wire.size, self.link, self._cores)
            quick = float(priced(facts, [plain] * len(every), self._costs).times.step < _QUICK)
        if not told(self._wire, stamp, [quick], 1)[0]:
            return False
        self._ways.update(dict.fromkeys(every, plain))
        return True

    def settle(self, stamp: Stamp) -> None:
        """Take what the last vote has found; before the first bucket of a step."""
        if self._now or self._pending is None:
            return
        self._pending.wait()  # long done, if gradients are used before the next ones are handed over
        self._pending = None
        if self._vote is not None:
            vote, self._vote = self._vote.tolist(), None
            self._taken(stamp, vote[0], vote[1], vote[2:])

    def look(self, place: int, gradients: Gradients, flat: Tensor, step: int) -> bool:
        """Before a bucket is handed over: whether its mean is to be `seen`."""
        looking = step == _FIRST - 1 or (step == self._due - 1 and self._votes_taken % _LOOKS == 0)
        if self._errors is None or not looking:
            return False
        exact = all(self._ways[Unit(place, unit.shapes)].choice.codec is None for unit in units([gradients.shapes]))
        self._errors.look(place, gradients, flat)
        return exact or step > _FIRST

    def seen(self, place: int, gradients: Gradients, flat: Tensor) -> None:
        """The mean of a bucket that was looked at."""
        if self._errors is not None:
            self._errors.mean(place, gradients, flat)

    def handed(self, gradients: Gradients) -> None:
        """A bucket is handed over."""
        self._now.append((gradients, time.thread_time()))

    def ended(self, step: int) -> bool:
        """All buckets of a step are handed over; whether a vote goes with them."""
        layout, computed, wall = tuple(one for one, _ in self._now), time.thread_time(), time.perf_counter()
        if layout != self._layout:
            self._ready.clear()
        elif self._begun[1]:
            self._seconds.append(wall - self._begun[1])
            self._ready.append([at - self._begun[0] for _, at in self._now])
            self._marks.append(self._worked)
        self._begun, self._layout, self._now = (computed, wall), layout, []
        return step >= self._due and bool(self._seconds)

    def timed(self, strand: Iterator[Any]) -> Iterator[Any]:
        """A strand whose work is counted."""
        while True:
            begin = time.thread_time()
            transfer = next(strand, None)
            self._worked += time.thread_time() - begin
            if transfer is None:
                return
            yield transfer

    def strand(self, stamp: Stamp) -> Iterator[Any]:
        """A vote."""
        worked = (self._marks[-1] - self._marks[0]) / max(len(self._marks) - 1, 1)
        ready = [statistics.median(times) for times in zip(*self._ready, strict=True)]
        every = self._units()
        errors = self._errors.told(every) if self._errors else []
        vote = torch.tensor([statistics.median(self._seconds), worked, *ready, *errors])
        total = self._totals.setdefault(len(vote), Total(self._wire, len(vote), torch.float32, largest=True))
        yield from total.run(Run(vote, None, stamp.step, stamp.bucket, stamp.tag, 0), vote, last=True)
        self._vote = vote

    def voting(self, future: Future[Any]) -> None:
        """The vote is done when this is."""
        self._pending = future

    @property
    def aside(self) -> bool:
        """Whether it needs to see nothing but times."""
        return self._errors is None

    @property
    def rounds(self) -> int:
        """Transfers of a vote, at most."""
        return 2

    @property
    def now(self) -> list[tuple[Unit, Gradients, Way]]:
        """What is done with the gradients of the last step, and their bucket."""
        known = [unit for unit in self._units() if unit in self._ways]
        return [(unit, self._layout[unit.bucket], self._ways[unit]) for unit in known]

    def sent(self, unit: Unit, way: Way) -> int:
        """Bytes that each process sends of a unit."""
        return sum(leg.sent for strand in self._rehearsal.strands(way.choice, unit.shapes) for leg in strand)

    def _units(self) -> tuple[Unit, ...]:
        return units([gradients.shapes for gradients in self._layout])

    def _taken(self, stamp: Stamp, seconds: float, worked: float, rest: Sequence[float]) -> None:
        every, self._seen = self._units(), seconds
        before = self.history[-1].facts.units if self.history else ()
        turned, self._turned = self._turned, False  # what was decided then was decided by steps over two links
        changed = self._learn(seconds, worked) or turned if self.history else True
        if self._errors:
            self._errors.take(every, rest[len(self._layout) :])
        facts = Facts(tuple(rest[: len(self._layout)]), every, self._wire.size, self.link, self._cores)
        self._change(facts, stamp, anew=changed or bool(self._errors) or every != before)
        self._due = stamp.step + max(1, min(self.auto.every, ceil(_APART / max(seconds, 1e-3))))
        self._seconds, self._marks = [], self._marks[-1:]
        self._votes_taken += 1

    def _learn(self, seconds: float, worked: float) -> bool:
        """From what came of the last decision: how fast the worker is, the link, and all together. Whether anything is
        so different that it should be decided anew."""
        before = self.history[-1]
        self.history[-1] = replace(before, seen=seconds)
        planned = before.decision.times.worker / self._pace
        self._pace = worked / planned if planned and worked else self._pace
        self._priced.clear()
        off = abs(seconds / before.expected - 1) > _OFF
        self._turned = self._look_at_link(seconds, off=off)
        if not self._turned:
            drag = Drag.of(seconds, before.decision.times.step)
            self._drag = drag if len(self.history) == 1 else self._drag.between(drag)
        return self._turned or off

    def _look_at_link(self, seconds: float, *, off: bool) -> bool:
        """Send a probe where steps are not as expected, or where the last one is long ago; nothing else is under way.
        Whether the link is another one now."""
        self._unprobed += len(self._seconds) * seconds
        self._calm = min(self._calm, seconds)
        messages = self.link.messages
        if not off:
            # Where sums are exact a faster link would change nothing; one that became slower little by little would, though
            # each vote expected about what it saw.
            if all(way.exact for way in self._ways.values()) and seconds < self._calm * (1 + _OFF):
                return False
            if self._unprobed * _PROBING < self._probe * messages.byte + messages.latency:
                return False
        found = probed(self._wire, self._probe, self._submit)
        byte = max(found - messages.latency - messages.work / min(1.0, self._cores), found / 4) / self._probe
        times, self._unprobed, self._calm = byte / messages.byte, 0.0, seconds
        self.link = self.link.slower(times)
        self._probe = probe_of(self.link)
        return abs(times - 1) > _OFF

    def _change(self, facts: Facts, stamp: Stamp, *, anew: bool) -> None:
        """Decide anew, where there is reason to; what is done now stays unless something else is clearly better."""
        best = self._decided(facts, facts.units, stamp, anew=anew)
        chosen = dict(zip(facts.units, best.ways, strict=True))
        if any(self._ways.get(unit) != way for unit, way in chosen.items()):
            self._ways, self.version, self._calm = chosen, self.version + 1, inf
        self.history.append(Outlook(stamp.step, facts, best, self._drag.expected(best.times.step)))

    def _decided(self, facts: Facts, known_as: Sequence[Unit], stamp: Stamp, *, anew: bool = True) -> Decision:
        """By the first process, with what it has measured; units may be known by other names than in these facts."""
        ways, told_of = self.auto.ways, [0.0]
        if self._wire.place == 0:
            best = (
                self._best(facts, known_as)
                if anew
                else priced(facts, [self._ways[one] for one in known_as], self._costs)
            )
            times = best.times
            told_of = [
                *(float(ways.index(way)) for way in best.ways),
                times.step,
                times.computing,
                times.worker,
                times.wire,
            ]
        found = told(self._wire, stamp, told_of, len(facts.units) + 4)
        chosen = tuple(ways[int(place)] for place in found[:-4])
        return Decision(chosen, Times(*found[-4:]), steps_of(facts, chosen))

    def _best(self, facts: Facts, known_as: Sequence[Unit]) -> Decision:
        allowed = None
        if self._errors:
            kept = self._errors.allowed(known_as, self.auto.ways)
            allowed = {unit: kept[name] for unit, name in zip(facts.units, known_as, strict=True)}
        known = self.history or facts.ready[-1]  # of computing, besides the link
        plain = [way for way in self.auto.ways if way.exact][:1] * len(facts.units)
        if not known and plain:
            exact = priced(facts, plain, self._costs)
            if exact.times.step < _SOON:
                return exact
        if not known:
            return blind(facts, self.auto.ways, self._costs, allowed)
        best = single(facts, self.auto.ways, self._costs, allowed)
        mixed = decide(facts, self.auto.ways, self._costs, allowed, _TRIED)
        best = mixed if mixed.price < best.price * (1 - _MIXED) else best
        now = [self._ways.get(name) for name in known_as]
        exact_now = all(way is not None and way.exact for way in now) and self._seen > 0
        if not (self.history or exact_now) or any(
            way is None or (allowed and way not in allowed[unit]) for unit, way in zip(facts.units, now, strict=True)
        ):
            return best
        stays = priced(facts, [way for way in now if way], self._costs)
        safer = sum(way.near for way in best.ways) > sum(way.near for way in stays.ways)
        # The backend's sums may be faster than messages of ours, by which they were simulated: what was seen counts, too.
        price = min(stays.price, self._seen) if exact_now else stays.price
        return best if safer or best.price < price * (1 - _BETTER) else stays

    def _costs(self, way: Way, shapes: tuple[tuple[int, ...], ...]) -> list[Strand]:
        """Legs of gradients, at the worker's pace; a decision asks for the same ones hundreds of times."""
        if (way, shapes) not in self._priced:
            strands = self._rehearsal.strands(way.choice, shapes)
            paced = [tuple(replace(leg, work=leg.work * self._pace) for leg in strand) for strand in strands]
            self._priced[way, shapes] = paced
        return self._priced[way, shapes]
