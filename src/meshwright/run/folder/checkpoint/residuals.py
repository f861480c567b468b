"""Error-feedback residuals in checkpoints: residuals and momenta of compressed gradients, for every rank.

They belong to one rank and to one sharding of the model, and are stored under a name that contains the plan and the
rank. The same rank of the same plan reads them, and training then resumes bit for bit. Under another plan or number of
ranks they are left out. The loss is less than one step's gradients, and training resumes from exact weights.
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
    """Return this rank's residuals by name."""
    return {
        f"{_prefix(part)}{i}.{name}": Pieces((len(value),), [(((0, len(value)),), value)])
        for i, sync in enumerate(part.synchronisers())
        for name, value in sync.state().items()
    }


def residuals_in(part: Parallel, saved: dict[str, torch.Size]) -> dict[str, Pieces]:
    """Return empty residuals in which to load this rank's; none if another plan wrote the checkpoint."""
    own = [name for name in saved if name.startswith(_prefix(part))] if part.synchronisers() else []
    found = {}
    for name in own:
        (count,) = saved[name]
        value = torch.zeros(count, dtype=torch.int64 if name.endswith(".counters") else torch.float32)
        found[name] = Pieces((count,), [(((0, count),), value)])
    return found


def restore_residuals(part: Parallel, read: dict[str, Pieces]) -> None:
    """Restore residuals that were read."""
    for i, sync in enumerate(part.synchronisers()):
        mine = f"{_prefix(part)}{i}."
        state = {name.removeprefix(mine): one.parts[0][1] for name, one in read.items() if name.startswith(mine)}
        if state:
            sync.restore(state)


def was_left_out(part: Parallel, saved: Iterable[str]) -> bool:
    """Return True if a checkpoint holds residuals that this plan cannot use."""
    names = [name for name in saved if name.startswith(_FIRST)]
    return bool(names) and not (part.synchronisers() and any(name.startswith(_prefix(part)) for name in names))


def _prefix(part: Parallel) -> str:
    """Return the prefix of names: the plan's sharding and rules, and the rank."""
    plan = part.plan
    facts = msgspec.json.encode([plan.pipelines, plan.compression], order="deterministic")
    return f"{_FIRST}{zlib.crc32(facts):08x}.{part.copies.rank}."
