"""Controller that decides during training, and refits the initial measurements to observations.

At some steps all ranks vote, with the maximum of each number: when buckets were ready, how long steps and encoding
took, and how long a probe took on the link. The first rank then decides and broadcasts, and the new choice holds from
the next step on. A probe is sent when steps take longer or shorter than predicted, and occasionally otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from meshwright.compression.auto.choose import Decision, blind, decide, priced, single, steps_of
from meshwright.compression.auto.errors import Errors
from meshwright.compression.auto.inputs import Auto, Facts, Link, Unit, Way, units
from meshwright.compression.auto.link import Submit, measured, neighbours, probe_of, probed, told
from meshwright.compression.auto.microbenchmark import Rehearsal
from meshwright.compression.auto.predictions import Drag, Expectation
from meshwright.compression.auto.simulation import Strand, Times
from meshwright.compression.auto.statistics import StepStatistics
from meshwright.compression.sync.bucket import Gradients
from meshwright.compression.sync.layout import Choice
from meshwright.compression.sync.sums import Total
from meshwright.compression.sync.topology import Run
from meshwright.compression.sync.transport.message import Stamp
from meshwright.compression.sync.transport.wire import Wire

_FIRST = 2  # the step of the first vote: DDP rebuilds its buckets after one step
_OFF = 0.25  # relative error of a step's prediction above which the link is probed
_PROBING = 0.02  # share of the time that probes may take
_BETTER = 0.1  # relative gain required for another choice: no two changes for nothing
_MIXED = 0.05  # relative gain required for a mixture: every change of strategy is one more message
_TRIED = 200  # simulations of mixtures per decision, about 0.1 s, for which all ranks wait
_SOON = 0.05  # seconds: faster exact sums of a bucket are not replaced before computing times are known
_QUICK = 0.15  # seconds: ... and those of all buckets, for which not even the hook is worth it
_APART = 2.0  # seconds between votes
_ENOUGH = 0.5  # seconds of steps that the first decision looks at
_NOTICED = 2e-3  # seconds of a step that compression must save: a hook, threads and their lock cost about half of it
_PATIENCE = 10  # votes during which exact sums stay after a return to them
_OUTLOOKS = 1000  # maximum number remembered
_LOOKS = 10  # votes between measurements of codec errors, if a guard is set


class Controller:
    """Controller of one synchroniser; all ranks create and call it at the same time."""

    def __init__(self, auto: Auto, wire: Wire, submit: Submit, *, feedback: bool, owned: bool = False) -> None:
        """Measure the link. `owned`: sums stay with the ranks that own their parts (reduce-scatter)."""
        self.auto, self._wire, self._submit = auto, wire, submit
        self.version = 0  # of the choices
        self.history: list[Expectation] = []
        self._cores = len(os.sched_getaffinity(0)) / neighbours(wire)
        self.link: Link = measured(wire, self._cores, submit)
        self._rehearsal = Rehearsal(wire.size, feedback, owned)
        self._errors = Errors(auto, feedback=feedback) if auto.guard is not None else None
        self._ways: dict[Unit, Way] = {}
        self._pace = 1.0  # of the worker, relative to microbenchmarks
        self._priced: dict[tuple[Way, Any], list[Strand]] = {}  # at that pace
        self._drag = Drag()
        self._turned = False  # True if the link had changed at the last probe
        self._probe = probe_of(self.link) if wire.size > 1 else 0  # bytes
        self._unprobed = 0.0  # seconds since the last probe
        self._calm = inf  # minimum seconds of a step since then, under the same choices
        self._due, self._votes_taken = _FIRST, 0
        self._tally = StepStatistics()
        self._seen = 0.0  # seconds of a step, at the last vote
        self._exact_extra = inf  # ... beyond computing, at the last vote with exact sums only over this link
        self._patience = 0  # votes until something other than exact sums is tried again
        self._vote: Tensor | None = None
        self._pending: Future[Any] | None = None
        self._totals: dict[int, Total] = {}

    def prepare(self, shapes: Sequence[tuple[int, ...]]) -> None:
        """Benchmark the strategies for gradients of these shapes, before there are any."""
        if self._wire.place == 0:
            for way in self.auto.ways:
                for shape in sorted(set(shapes)):
                    self._costs(way, (shape,))

    def choices(self, place: int, gradients: Gradients, stamp: Stamp) -> list[Choice]:
        """Return a choice for every gradient of a bucket."""
        own = [Unit(place, unit.shapes) for unit in units([gradients.shapes])]
        if any(unit not in self._ways for unit in own):  # only the link is known
            facts = Facts((0.0,), tuple(units([gradients.shapes])), self._wire.size, self.link, self._cores)
            self._ways.update(zip(own, self._decided(facts, own, stamp).ways, strict=True))
        return [self._ways[unit].choice for unit in own for _ in unit.shapes]

    def stands_aside(self, buckets: Sequence[Gradients], stamp: Stamp) -> bool:
        """Return True if exact sums are so fast that nothing else is done before computing times are known."""
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
        """Apply the result of the last vote; called before the first bucket of a step."""
        if self._tally.now or self._pending is None:
            return
        self._pending.wait()  # long done, if gradients are used before the next ones are submitted
        self._pending = None
        if self._vote is not None:
            vote, self._vote = self._vote.tolist(), None
            self._taken(stamp, vote[0], vote[1], vote[2:])

    def looking(self, step: int) -> bool:
        """Return True if gradients are examined in a step: then all sums are exact, as a reference."""
        due = step == _FIRST - 1 or (step == self._due - 1 and self._votes_taken % _LOOKS == 0)
        return self._errors is not None and due

    def look(self, place: int, gradients: Gradients, flat: Tensor) -> None:
        """Examine a bucket before it is submitted."""
        if self._errors is not None:
            self._errors.look(place, gradients, flat)

    def seen(self, place: int, gradients: Gradients, flat: Tensor) -> None:
        """Examine the mean of a bucket."""
        if self._errors is not None:
            self._errors.mean(place, gradients, flat)

    def handed(self, gradients: Gradients) -> None:
        """Record that a bucket is submitted."""
        self._tally.handed(gradients)

    def ended(self, step: int) -> bool:
        """Record that all buckets of a step are submitted; return True if a vote follows."""
        return self._tally.ended(counts=not self.looking(step)) and step >= self._due

    def timed(self, strand: Iterator[Any]) -> Iterator[Any]:
        """Run a strand and count its work."""
        return self._tally.timed(strand)

    def strand(self, stamp: Stamp) -> Iterator[Any]:
        """Return the strand of a vote."""
        errors = self._errors.told(self._units()) if self._errors else []
        vote = torch.tensor([*self._tally.told(), *errors])
        total = self._totals.setdefault(len(vote), Total(self._wire, len(vote), torch.float32, largest=True))
        yield from total.run(Run(vote, None, stamp.step, stamp.bucket, stamp.tag, 0), vote, last=True)
        self._vote = vote

    def voting(self, future: Future[Any]) -> None:
        """Set the future that ends the vote."""
        self._pending = future

    @property
    def rounds(self) -> int:
        """Maximum number of transfers of a vote."""
        return 2

    @property
    def now(self) -> list[tuple[Unit, Gradients, Way]]:
        """Strategies of the gradients in the last step, with their buckets."""
        known = [unit for unit in self._units() if unit in self._ways]
        return [(unit, self._tally.layout[unit.bucket], self._ways[unit]) for unit in known]

    def sent(self, unit: Unit, way: Way) -> int:
        """Return the bytes that each rank sends for a unit."""
        return sum(leg.sent for strand in self._rehearsal.strands(way.choice, unit.shapes) for leg in strand)

    def _units(self) -> tuple[Unit, ...]:
        return units([gradients.shapes for gradients in self._tally.layout])

    def _taken(self, stamp: Stamp, seconds: float, worked: float, rest: Sequence[float]) -> None:
        steps, short = len(self._tally.seconds), not self.history and seconds * len(self._tally.seconds) < _ENOUGH
        if short and self._votes_taken == 0 and self.auto.every is None:
            self._due = stamp.step + ceil(_ENOUGH / max(seconds, 1e-3))  # first steps are not typical
            self._votes_taken += 1
            return
        every, self._seen, self._patience = self._units(), seconds, max(self._patience - 1, 0)
        before = self.history[-1].facts.units if self.history else ()
        every = before if every == before else every  # share one object in memory
        turned, self._turned = self._turned, False  # that decision was based on steps over two links
        changed = self._learn(seconds, worked, steps) or turned if self.history else True
        if self._errors:
            self._errors.take(every, rest[len(self._tally.layout) :])
        ready = tuple(rest[: len(self._tally.layout)])
        if not self._turned and all(way.exact for way in self._ways.values()):
            self._exact_extra = seconds - ready[-1]
        facts = Facts(ready, every, self._wire.size, self.link, self._cores)
        anew = changed or bool(self._errors) or every != before or self._loses(facts)
        self._change(facts, stamp, anew=anew)
        self._due = stamp.step + (self.auto.every or max(1, ceil(_APART / max(seconds, 1e-3))))
        self._tally.begin()
        self._votes_taken += 1

    def _loses(self, facts: Facts) -> bool:
        """Return True if exact sums were observed to be at least as fast as the current choice, over the same link."""
        now = [self._ways.get(unit) for unit in facts.units]
        if None in now or all(way.exact for way in now if way):
            return False
        return self._seen * steps_of(facts, [way for way in now if way]) > self._exact_extra + facts.ready[-1]

    def _learn(self, seconds: float, worked: float, steps: int) -> bool:
        """Update the speeds of the worker, of the link and of steps from the last decision's outcome.

        Return True if a change is large enough for a new decision.
        """
        before = self.history[-1]
        self.history[-1] = replace(before, seen=seconds)
        planned = before.decision.times.worker / self._pace
        self._pace = worked / planned if planned and worked else self._pace
        self._priced.clear()
        off = abs(seconds / before.expected - 1) > _OFF
        self._turned = self._wire.size > 1 and self._look_at_link(seconds, steps, off=off)
        if not self._turned:
            drag = Drag.of(seconds, before.decision.times.step)
            self._drag = drag if len(self.history) == 1 else self._drag.between(drag)
        return self._turned or off

    def _look_at_link(self, seconds: float, steps: int, *, off: bool) -> bool:
        """Probe the link if steps differ from predictions, or if the last probe is old; nothing else is in transfer.

        Return True if the link has changed.
        """
        self._unprobed += steps * seconds
        self._calm = min(self._calm, seconds)
        messages = self.link.messages
        if not off:
            # With exact sums a faster link would change nothing. A link that slows down gradually would, though each
            # vote saw about what it predicted.
            if all(way.exact for way in self._ways.values()) and seconds < self._calm * (1 + _OFF):
                return False
            if self._unprobed * _PROBING < self._probe * messages.byte + messages.latency:
                return False
        found = probed(self._wire, self._probe, self._submit)
        byte = max(found - messages.latency - messages.work / min(1.0, self._cores), found / 4) / self._probe
        times, self._unprobed, self._calm = byte / messages.byte, 0.0, seconds
        self.link = self.link.slower(times)
        self._probe = probe_of(self.link)
        turned = abs(times - 1) > _OFF
        if turned:
            self._exact_extra, self._patience = inf, 0
        return turned

    def _change(self, facts: Facts, stamp: Stamp, *, anew: bool) -> None:
        """Decide anew if there is reason to; the current choice stays unless another is clearly better."""
        best = self._decided(facts, facts.units, stamp, anew=anew)
        chosen = dict(zip(facts.units, best.ways, strict=True))
        if any(self._ways.get(unit) != way for unit, way in chosen.items()):
            self._ways, self.version, self._calm = chosen, self.version + 1, inf
        if len(self.history) == _OUTLOOKS:
            del self.history[1]  # the first one and the latest stay
        self.history.append(Expectation(stamp.step, facts, best, self._drag.expected(best.times.step)))

    def _decided(self, facts: Facts, known_as: Sequence[Unit], stamp: Stamp, *, anew: bool = True) -> Decision:
        """Decide on the first rank, with its measurements; units may have other names than in these facts."""
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
        known = self.history or facts.ready[-1]  # computing times, besides the link
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
        if plain and self._loses(facts):
            self._patience = _PATIENCE
            return priced(facts, plain, self._costs)
        if exact_now:
            # The backend's sums may be faster than our messages, by which they were simulated: the observation counts.
            price = min(stays.price, self._seen)
            saves = price - best.price > max(_BETTER * price, _NOTICED)
            return best if saves and not self._patience else stays
        safer = sum(way.near for way in best.ways) > sum(way.near for way in stays.ways)
        return best if safer or best.price < stays.price * (1 - _BETTER) else stays

    def _costs(self, way: Way, shapes: tuple[tuple[int, ...], ...]) -> list[Strand]:
        """Return the legs of gradients at the worker's pace; cached, as a decision asks hundreds of times."""
        if (way, shapes) not in self._priced:
            strands = self._rehearsal.strands(way.choice, shapes)
            paced = [tuple(replace(leg, work=leg.work * self._pace) for leg in strand) for strand in strands]
            self._priced[way, shapes] = paced
        return self._priced[way, shapes]
