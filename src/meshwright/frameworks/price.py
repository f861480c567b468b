"""Price an export: the step of the given plan beside that of the plan in the files."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.cost.estimate import Estimate, estimate
from meshwright.frameworks.contract import Exported, Format
from meshwright.plans import Job, Plan
from meshwright.search.space.targets import target

_VISIBLE = 0.0005  # of a step: smaller values round to zero


@dataclass(frozen=True)
class Price:
    """Both plans, predicted as the framework runs them."""

    given: Estimate
    said: Estimate

    @property
    def text(self) -> str:
        """Price in one line."""
        seconds = self.said.step_seconds
        line = f"predicted step {seconds:.4g} s, MFU {self.said.mfu:.1%} (runtime {self.said.runtime.name})"
        change = seconds / self.given.step_seconds - 1
        if abs(change) >= _VISIBLE:
            line = f"{line}; as given {self.given.step_seconds:.4g} s ({change:+.1%})"
        return line if self.said.fits else f"{line}; it does not fit into memory"


def runtime_of(found: Format) -> str:
    """Return the runtime whose times a format's files take."""
    return target(found.target or "meshwright").runtime


def price(job: Job, plan: Plan, exported: Exported, found: Format) -> Price:
    """Price the given plan and the exported one, under the same runtime."""
    name = runtime_of(found)
    given = estimate(job, plan, name)
    return Price(given, given if exported.plan == plan else estimate(job, exported.plan, name))
