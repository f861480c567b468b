"""Result of an analysis: the facts of every rank, and what follows from all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # only for types: starting stays fast
    from meshwright.traces.gather_ranks import Broken
    from meshwright.traces.job.across import Across
    from meshwright.traces.job.critical_path import CriticalPath
    from meshwright.traces.job.difference import Difference
    from meshwright.traces.job.plan.against_plan import Against
    from meshwright.traces.job.stragglers.operation_records import RecordedJob
    from meshwright.traces.job.stragglers.stragglers import Stragglers
    from meshwright.traces.rank.facts import RankFacts
    from meshwright.traces.rank.memory.snapshot import Snapshot
    from meshwright.traces.reading import Note


@dataclass(frozen=True, eq=False)
class Analysis:
    """Facts of a job, as `meshwright.analyze` returns them. Times are nanoseconds."""

    ranks: tuple[RankFacts, ...]  # in order of rank
    broken: tuple[Broken, ...]  # unreadable files
    notes: tuple[Note, ...]  # what was left out or assumed, beside the notes of each rank
    across: Across  # the ranks side by side
    stragglers: Stragglers
    promised: Against | None  # comparison with the plan that was run, if it is known
    paths: tuple[CriticalPath, ...]  # the critical path of each step across ranks
    snapshots: tuple[tuple[str, tuple[Snapshot, ...]], ...]  # of memory: file, and its devices
    records: tuple[RecordedJob, ...]  # jobs recorded as operations instead of traces

    def against(self, before: Analysis) -> Difference:
        """Return the changes since another run."""
        from meshwright.traces.job.difference import difference

        return difference(before.ranks, self.ranks)
