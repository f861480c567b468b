"""The request of a launch: `meshwright train` under a plan, with the same options, on every rank."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import msgspec

from meshwright.errors import InputError
from meshwright.launchers.placement import Alike, alike, in_words
from meshwright.plans import Job, Plan
from meshwright.run.options import Training

GRACE = 300  # seconds from the signal to end until a job is killed: one step, and a checkpoint
PORT = 29500  # torchrun's own default

# Options of `meshwright train` whose name differs from the field's.
_FLAGS = {"evaluate_every": "--eval-every", "dynamic": "--dynamic-precision", "guard": "--no-guard"}
_DRIVEN = ("nvidia", "amd", "generic")
_LONGEST_NAME = 40  # characters: Kubernetes adds to them, and host names have at most 63


@dataclass(frozen=True)
class Request:
    """Run to be started somewhere; `file` is the path at which its ranks find the plan."""

    job: Job
    plan: Plan
    file: str
    run: Training
    name: str = ""

    def __post_init__(self) -> None:
        name = self.name or f"train-{re.sub('[^a-z0-9]+', '-', self.job.model.name.lower()).strip('-')}"
        name = name if self.name else name[:_LONGEST_NAME].rstrip("-")
        if not re.fullmatch(rf"[a-z](?:[a-z0-9-]{{0,{_LONGEST_NAME - 2}}}[a-z0-9])?", name):
            valid = f"a letter, then letters, digits and -, at most {_LONGEST_NAME}, all small"
            raise InputError(f"'{name}' cannot name a job", field="--name", valid=valid)
        object.__setattr__(self, "name", name)

    @property
    def nodes(self) -> tuple[Alike, ...]:
        """Used nodes, grouped where they are alike."""
        return alike(self.job, self.plan)

    @property
    def lines(self) -> list[str]:
        """Ranks by node for people, with warnings."""
        found = [in_words(self.job, some) for some in self.nodes]
        kinds = [self.job.cluster.groups[some.group].device for some in self.nodes]
        others = sorted({kind.name for kind in kinds if kind.vendor not in _DRIVEN})
        note = "note: training drives devices through CUDA or ROCm; on {} the processors would train"
        return found + [note.format(name) for name in others]

    def started_again(self) -> Request:
        """Return the request for a scheduler that may restart it: training resumes from the last checkpoint."""
        if not self.run.output:
            return self
        return replace(self, run=msgspec.structs.replace(self.run, resume=False, auto_resume=True))

    @property
    def command(self) -> list[str]:
        """Arguments of `python -m` on every rank."""
        return ["meshwright", "train", "--plan", self.file, *arguments(self.run)]


def arguments(run: Training) -> list[str]:
    """Return the options of `meshwright train` for this run; defaults are left out.

    >>> arguments(Training(steps=10, data="tokens", lr=0.001, guard=False))
    ['--steps', '10', '--data', 'tokens', '--lr', '0.001', '--no-guard']
    """
    found: list[str] = []
    for field in msgspec.structs.fields(Training):
        value = getattr(run, field.name)
        if value == field.default:
            continue
        if field.name == "evaluate_batches":
            raise InputError(f"is {value}, which no option of train says", field="evaluate_batches", valid="4")
        flag = _FLAGS.get(field.name, f"--{field.name.replace('_', '-')}")
        found += [flag] if isinstance(value, bool) else [flag, str(value)]
    return found
