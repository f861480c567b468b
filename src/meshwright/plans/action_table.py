"""Action tables of pipeline schedules: per device group, its actions in order.

The tables equal those of PyTorch's pipeline schedules, action by action. The cost model, the picture and the runtime
use the same object.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import lru_cache
from operator import ge

from meshwright.plans.schedule import V_SHAPED, Action, Schedule, group_of_stage, parse_action

ActionTable = tuple[tuple[Action, ...], ...]


@lru_cache(maxsize=64)
def action_table(schedule: Schedule, groups: int, micro_batches: int) -> ActionTable:
    """Return the actions of every device group.

    >>> ["".join(map(str, action)) for action in action_table(Schedule(name="1f1b"), 2, 2)[0]]
    ['0F0', '0F1', '0B0', '0B1']
    """
    if schedule.name == "custom":
        rows = [[action for text in row if (action := parse_action(text))] for row in schedule.table]
        return tuple(map(tuple, rows))
    make: Callable[[Schedule, int, int, int], list[Action]] = {
        "gpipe": _gpipe,
        "1f1b": _one_forward_one_backward,
        "interleaved": _one_forward_one_backward,
        "zero-bubble": _one_forward_one_backward,
        "zbv": _zero_bubble_v,
        "dualpipev": _dual_pipe_v,
    }[schedule.name]
    return tuple(tuple(make(schedule, groups, micro_batches, group)) for group in range(groups))


@lru_cache(maxsize=4096)
def in_flight(schedule: Schedule, groups: int, micro_batches: int, group: int) -> tuple[tuple[int, ...], ...]:
    """Return the largest mixes of micro-batches in flight, per stage of a group.

    The stages' sizes decide which mix is largest, so every mix is listed that no other exceeds in all stages. GPipe
    holds all micro-batches, 1F1B one per group from here to the end; other schedules are counted from their table.

    >>> in_flight(Schedule(name="1f1b"), groups=4, micro_batches=16, group=0)
    ((4,),)
    >>> in_flight(Schedule(name="interleaved", virtual=2), groups=2, micro_batches=4, group=0)
    ((3, 2), (4, 1))
    """
    if schedule.name == "gpipe":
        return ((micro_batches,),)
    if schedule.name == "1f1b":
        return ((min(micro_batches, groups - group),),)
    if schedule.name == "zero-bubble" and schedule.virtual == 1:
        return ((min(micro_batches, groups),),)  # weight gradients lag by as many as a group runs fewer ahead
    if schedule.name == "zbv" and micro_batches >= 2 * groups:
        return ((2 * groups - group - 1, group + 1), (2 * groups - group, group))
    if schedule.name == "interleaved" and schedule.virtual > 1:
        return _interleaved_mixes(groups, micro_batches, schedule.virtual, group)
    return _walked(schedule, groups, micro_batches, group)


def _interleaved_mixes(p: int, m: int, v: int, group: int) -> tuple[tuple[int, ...], ...]:
    """Return the mixes of interleaved 1F1B.

    After its warm-up a group holds equally many at every forward; the mix repeats with every round.
    """
    per_round, ahead = rounds(p, m, v, 2 * (p - 1 - group))
    held = [0] * v
    for step in range(ahead):
        held[step // per_round % v] += 1
    mixes = {tuple(held)} if ahead == m * v else set()
    for step in range(ahead, min(m * v, ahead + v * per_round)):
        held[step // per_round % v] += 1
        mixes.add(tuple(held))
        held[v - 1 - (step - ahead) // per_round % v] -= 1
    return tuple(sorted(mixes))


def rounds(p: int, m: int, v: int, hops: int) -> tuple[int, int]:
    """Return the micro-batches of a round, and the forwards that a group runs ahead."""
    per_round = m // max(1, m // p)
    return per_round, min((v - 1) * per_round + hops, m * v)


def _walked(schedule: Schedule, groups: int, micro_batches: int, group: int) -> tuple[tuple[int, ...], ...]:
    """Return the largest mixes of any schedule, counted from its table."""
    row = action_table(schedule, groups, _enough(schedule, groups, micro_batches))[group]
    stages = groups * schedule.virtual
    mine = [s for s in range(stages) if group_of_stage(schedule, stages, s) == group]
    held = dict.fromkeys(mine, 0)
    mixes = set()
    for stage, kind, _ in row:
        held[stage] += {"F": 1, "B": -1, "W": -1, "I": 0}[kind]
        mixes.add(tuple(held.values()))
    largest: list[tuple[int, ...]] = []
    for mix in sorted(mixes, key=sum, reverse=True):  # a mix that exceeds another has a larger sum
        if not any(_exceeds(other, mix) for other in largest):
            largest.append(mix)
    return tuple(sorted(largest))


def _exceeds(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(map(ge, a, b))


def _enough(schedule: Schedule, groups: int, micro_batches: int) -> int:
    """Return enough micro-batches for the peak: full rounds repeat, so a few hold as much as thousands."""
    few = 6 * groups
    if schedule.name == "custom" or micro_batches <= few:
        return micro_batches
    return few if schedule.name in V_SHAPED or micro_batches % groups == 0 else micro_batches


class _Row:
    """Actions of one group. Micro-batches of a stage come in order, so an action need not name its own."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: Counter[tuple[int, str]] = Counter()
        self._weights: deque[tuple[int, int]] = deque()  # input gradients whose weight gradients are due

    def add(self, stage: int, kind: str) -> None:
        counter = (stage, "F" if kind == "F" else "B")  # whole backwards and input gradients share one count
        number = self._next[counter]
        self._next[counter] += 1
        self.actions.append((stage, kind, number))
        if kind == "I":
            self._weights.append((stage, number))

    def weight(self, stage: int | None = None) -> None:
        """Append the oldest weight gradient that is due, of one stage or any; nothing if none is."""
        due = next((item for item in self._weights if stage in (None, item[0])), None)
        if due:
            self._weights.remove(due)
            self.actions.append((due[0], "W", due[1]))

    def all_weights(self, stage: int | None = None) -> None:
        while any(stage in (None, item[0]) for item in self._weights):
            self.weight(stage)


def _gpipe(schedule: Schedule, groups: int, micro_batches: int, group: int) -> list[Action]:
    row = _Row()
    for kind in ("F", "B"):
        for _ in range(micro_batches):
            row.add(group, kind)
    return row.actions


def _one_forward_one_backward(schedule: Schedule, groups: int, micro_batches: int, group: int) -> list[Action]:
    """Return 1F1B, interleaved 1F1B (Narayanan et al., 2021), or the zero-bubble form (Qi et al., 2023).

    Forwards go through the group's stages in rounds of micro-batches, backwards in reverse. A group runs some forwards
    ahead, then one of each in turn. Zero-bubble runs fewer ahead. It fills the bubbles with weight gradients, which lag
    by as many backwards as the group's distance from the first.
    """
    p, m, v, r = groups, micro_batches, schedule.virtual, group
    zero_bubble = schedule.name == "zero-bubble"
    per_round, ahead = rounds(p, m, v, (p - 1 - r) * (1 if v == 1 or zero_bubble else 2))
    row = _Row()
    for step in range(m * v + ahead):
        if step < m * v:
            row.add(step // per_round % v * p + r, "F")
        done = step - ahead
        if done >= 0:
            local = v - 1 - done // per_round % v
            row.add(local * p + r, "I" if zero_bubble else "B")
            if zero_bubble and done >= r:
                row.weight()
    row.all_weights()
    return row.actions


def _zero_bubble_v(schedule: Schedule, groups: int, micro_batches: int, group: int) -> list[Action]:
    """Return ZB-V (Qi et al., 2023): each group runs a stage on the way down and one on the way back up.

    The table is built for at least 2p - 1 micro-batches; actions beyond the real number are dropped.
    """
    p, r = groups, group
    count = max(2 * p - 1, micro_batches)
    down, up = r, 2 * p - 1 - r
    row = _Row()

    def both_halves(stage: int) -> None:
        row.add(stage, "I")
        row.weight()

    for _ in range(2 * (p - r) - 1):
        row.add(down, "F")
    for _ in range(r):
        row.add(up, "F")
        row.add(down, "F")
    for _ in range(p - r):
        row.add(up, "F")
        both_halves(up)
    sent, returned = 2 * p - r - 1, p  # forwards so far on the way down and on the way up
    while returned < max(sent, count):
        if sent < count:
            row.add(down, "F")
            sent += 1
        both_halves(down)
        row.add(up, "F")
        returned += 1
        both_halves(up)
    for _ in range(r):
        row.add(down, "I")
        row.add(up, "I")
    for _ in range(p - r):
        row.add(down, "I")
        row.weight(down)
    row.all_weights(up)
    row.all_weights(down)
    return [action for action in row.actions if action[2] < micro_batches]


def _dual_pipe_v(schedule: Schedule, groups: int, micro_batches: int, group: int) -> list[Action]:
    """Return DualPipeV (DeepSeek-V3, 2024): forwards of one direction overlap backwards of the other.

    The table lists an overlapped pair as its forward, then its backward.
    """
    p, r = groups, group
    down, up = r, 2 * p - 1 - r
    row = _Row()
    for _ in range(2 * (p - r - 1)):
        row.add(down, "F")
    for _ in range(r + 1):
        row.add(down, "F")
        row.add(up, "F")
    for _ in range(p - r - 1):
        row.add(up, "I")
        row.weight()
        row.add(up, "F")
    for _ in range(micro_batches - 2 * p + r + 1):
        for forward, backward in ((down, up), (up, down)):
            row.add(forward, "F")
            row.add(backward, "B")
    for _ in range(p - r - 1):
        row.add(up, "B")
        row.add(up, "F")
        row.add(down, "B")
    # The second half of the remaining backwards is split: weight gradients fill the end.
    half = (r + 1) // 2
    for i in range(r + 1):
        row.add(up, "I" if i > half or (i == half and r % 2 == 1) else "B")
        row.add(down, "I" if i >= half else "B")
    for _ in range(p - r - 1):
        row.weight()
        row.add(down, "I")
    row.all_weights()
    return row.actions
