"""What compressed gradients have not said yet, in checkpoints: residuals and momenta of every process.

They belong to one process and to one cut of the model. So they are written under a name that tells the plan and the rank,
and are read by the same rank of the same plan, which then goes on to the last bit. Under another plan, or another number of
processes, they are left out: what is lost is less than one step's gradients, and training goes on from exact weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import msgspec
import torch

from meshwright.run.folder.checkpoint.state import Pieces
from meshwright.run.parallel.parallel_model import Parallel

_FIRST = "compression."


def residuals_of(part: Parallel) -> dict[str, Pieces]:
    """Of this process, by name."""
    return {
        f"{_prefix(part)}{i}.{name}": Pieces((len(value),), [(((0, len(value)),), value)])
        for i, sync in enumerate(part.synchronisers())
        for name, value in sync.state().items()
    }


def residuals_in(part: Parallel, saved: dict[str, torch.Size]) -> dict[str, Pieces]:
    """Room for what a checkpoint has for this process; nothing if another plan wrote it."""
    own = [name for name in saved if name.startswith(_prefix(part))] if part.synchronisers() else []
    found = {}
    for name in own:
        (count,) = saved[name]
        value = torch.zeros(count, dtype=torch.int64 if name.endswith(".counters") else torch.float32)
        found[name] = Pieces((count,), [(((0, count),), value)])
    return found


def restore_residuals(part: Parallel, read: dict[str, Pieces]) -> None:
    """Go on from what was read."""
    for i, sync in enumerate(part.synchronisers()):
        mine = f"{_prefix(part)}{i}."
        state = {name.removeprefix(mine): one.parts[0][1] for name, one in read.items() if name.startswith(mine)}
        if state:
            sync.restore(state)


def was_left_out(part: Parallel, saved: Iterable[str]) -> bool:
    """Whether a checkpoint holds something unsaid that this plan cannot take up."""
    names = [name for name in saved if name.startswith(_FIRST)]
    return bool(names) and not (part.synchronisers() and any(name.startswith(_prefix(part)) for name in names))


def _prefix(part: Parallel) -> str:
    """Tells the plan's cut and rules, and the rank."""
    plan = part.plan
    facts = msgspec.json.encode([plan.pipelines, plan.compression], order="deterministic")
    return f"{_FIRST}{zlib.crc32(facts):08x}.{part.copies.rank}."
