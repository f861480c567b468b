"""`explain(job, plan)`: the parts of a step, its bottleneck, and the best improvements, for any plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.cost.estimate import Estimate, estimate
from meshwright.cost.runtime import Runtime
from meshwright.plans import Job, Plan
from meshwright.search.explanation.bottleneck import Limit, StageLimit, limit_of, stage_limits
from meshwright.search.explanation.improvements import Help, helps
from meshwright.search.explanation.runners_up import RunnerUp, runners_up
from meshwright.search.explanation.time_breakdown import Spending, losses

BUDGET = 1.0  # seconds for all searches of an explanation


@dataclass(frozen=True)
class Explanation:
    """Explanation of one plan."""

    estimate: Estimate
    spending: Spending
    limit: Limit  # largest cost now
    stages: tuple[StageLimit, ...]  # limit of each device group
    helps: tuple[Help, ...]  # largest gain first

    def to_table(self) -> dict[str, Any]:
        """Return the explanation as JSON knows it; times in seconds, gains as parts of the tokens per second."""
        found = self.estimate
        return {
            "step_time_s": found.step_seconds,
            "tokens_per_s_per_device": found.tokens_per_second_per_device,
            "mfu": found.mfu,
            "fits": found.fits,
            "seconds": self.spending.groups,
            "exposed_communication": self.spending.exposed,
            "limit": asdict(self.limit),
            "stages": [asdict(s) | {"free_bytes": s.free_bytes, "text": s.text} for s in self.stages],
            "helps": [asdict(h) | {"text": h.text} for h in self.helps],
        }


def explain(
    job: Job, plan: Plan, runtime_name: str | Runtime = "meshwright", *, seconds: float = BUDGET
) -> Explanation:
    """Explain a plan, whether a search found it or a person wrote it.

    `seconds` is the time to search for improvements (none: no search).

    >>> import meshwright as mw
    >>> job = mw.Job(mw.Model.preset("gpt2-xl"), mw.Cluster.preset("8xa100-80gb"), global_batch=64, seq_len=1024)
    >>> explain(job, mw.Plan.of({"pp": 4}, job), seconds=0.5).helps[0].change
    'the best plan'
    """
    found = estimate(job, plan, runtime_name)
    try:
        more = helps(found, seconds) if seconds > 0 else ()
    except KeyboardInterrupt:  # the priced part is still worth showing
        more = ()
    return Explanation(found, Spending.of(found), limit_of(found), stage_limits(found), more)


__all__ = ["BUDGET", "Explanation", "RunnerUp", "explain", "losses", "runners_up"]
