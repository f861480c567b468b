"""Seconds of a step in a few groups, and the losses of one plan against another."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost.chrome_trace import NAMES
from meshwright.cost.estimate import Estimate

# Parts of an estimate's breakdown -> their group; every other part is communication, listed by axis.
_GROUP_OF = {
    "forward compute": "compute", "backward compute": "compute", "recompute": "recompute",
    "pipeline bubble": "bubble", "gradients": "gradients", "optimizer": "optimizer", "host": "host",
    "stragglers": "stragglers", "waiting": "stragglers",
}  # fmt: skip
GROUPS = ("compute", "recompute", "bubble", "communication", "gradients", "optimizer", "host", "stragglers")
MEMORY_SAVERS = ("offload", "swap")  # axes of communication that save memory
# Names for people.
TITLES = {
    "bubble": "pipeline bubble", "communication": "exposed communication", "host": NAMES["host"],
    "stragglers": NAMES["waiting"],
}  # fmt: skip
_VISIBLE = 0.0005  # of a step; smaller parts are not listed


@dataclass(frozen=True)
class Spending:
    """Seconds of one step by group; they add up to the step."""

    step_seconds: float
    groups: dict[str, float]  # every name of GROUPS
    exposed: dict[str, float]  # the group "communication" by axis, as `breakdown` names them

    @staticmethod
    def of(found: Estimate) -> Spending:
        """Return the spending of an estimate.

        >>> import meshwright as mw
        >>> job = mw.Job(mw.Model.preset("llama3-8b"), mw.Cluster.preset("8xh100"), global_batch=64, seq_len=8192)
        >>> spent = Spending.of(mw.estimate(job, {"tp": 2, "pp": 2, "recompute": "full"}))
        >>> abs(sum(spent.groups.values()) / spent.step_seconds - 1) < 1e-6
        True
        """
        groups, exposed = dict.fromkeys(GROUPS, 0.0), {}
        for name, seconds in found.breakdown.items():
            groups[_GROUP_OF.get(name, "communication")] += seconds
            if name not in _GROUP_OF:
                exposed[name] = seconds
        return Spending(found.step_seconds, groups, exposed)

    @property
    def parts(self) -> dict[str, float]:
        """Groups with communication by axis, under the names people read."""
        found = {TITLES.get(name, name): s for name, s in self.groups.items() if name != "communication"}
        return found | {NAMES.get(axis, axis): seconds for axis, seconds in self.exposed.items()}

    def part(self, group: str) -> float:
        """Return the fraction of the step that a group takes."""
        return self.groups[group] / self.step_seconds


def losses(winner: Estimate, other: Estimate, most: int = 2) -> str:
    """Return the parts on which `other` spends more than `winner`, in parts of the winner's step, for equal tokens."""
    worse = [(name, part) for name, part in differences(winner, other) if part >= _VISIBLE][:most]
    text = ", ".join(f"{name} {percent(part)}" for name, part in worse) or "nothing"
    spare = other.peak_memory - winner.peak_memory
    if spare > 0.05 * winner.memory[0].capacity:
        text += f", {spare / 2**30:.0f} GiB more memory"
    return text


def differences(first: Estimate, second: Estimate) -> list[tuple[str, float]]:
    """Return (part, extra time of the second, in parts of the first's step), the greatest first."""
    scale = first.job.tokens_per_step / second.job.tokens_per_step
    mine, theirs = Spending.of(first).parts, Spending.of(second).parts
    names = dict.fromkeys([*mine, *theirs])
    found = [(n, (theirs.get(n, 0.0) * scale - mine.get(n, 0.0)) / first.step_seconds) for n in names]
    return sorted(found, key=lambda item: -item[1])


def percent(part: float) -> str:
    """Return a change in percent, with one decimal while it is small.

    >>> percent(0.114), percent(0.031), percent(-0.002)
    ('+11 %', '+3.1 %', '-0.2 %')
    """
    return f"{100 * part:+.0f} %" if abs(part) >= 0.0995 else f"{100 * part:+.1f} %"
