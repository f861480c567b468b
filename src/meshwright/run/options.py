"""What a training run is beside its plan: how long, on what, how fast it learns, what it leaves behind."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta

from meshwright.base.tables import Table
from meshwright.errors import InputError

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0, lt=1e38)]


class Training(Table, frozen=True, kw_only=True):
    """One run. `plan.json` says how it is parallel, this says what is trained.

    >>> Training(steps=10).rate_at(0) < Training(steps=10).rate_at(1)
    True
    """

    steps: Annotated[int, Meta(ge=1)]
    data: str = "synthetic"
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    lr: Positive = 3e-4
    warmup: Annotated[int, Meta(ge=0, description="steps over which the rate rises")] = 2
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    clip: Annotated[float, Meta(ge=0, lt=1e38, description="largest norm of all gradients; 0: any")] = 1.0
    weight_decay: Annotated[float, Meta(ge=0, lt=1e38)] = 0.1
    balance: Literal["sample", "batch"] = "sample"  # what the balance loss of a mixture is of
    evaluate_every: Count = 0
    evaluate_batches: Annotated[int, Meta(ge=1)] = 4
    output: str = ""  # the run's folder: plan, events, checkpoints; empty: nothing is written
    save_every: Count = 0  # steps between checkpoints; 0: one at the end
    keep: Annotated[int, Meta(ge=1)] = 2
    resume: bool = False
    auto_resume: bool = False  # go on where there is a checkpoint, else begin: what a scheduler starts again
    init_from: str = ""  # a folder with weights as Hugging Face writes them
    export: str = ""  # a folder to write such weights to at the end
    lora: Count = 0  # rank of the adapters; 0: all weights are trained
    dynamic: bool = False  # every product in the coarsest type that its numbers stand
    guard: bool = True  # leave out steps whose loss is far above its recent level
    wait: Annotated[float, Meta(ge=0, lt=1e38)] = 0.0  # seconds a rank may let others wait; 0: 20 steps, 300 at least
    profile: str = ""  # a folder for a trace of a few steps

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0: a rise, then a fall to a tenth."""
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        if self.decay == "constant":
            return self.lr
        part = 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.lr * (0.1 + 0.9 * part)

    def held_out(self, global_batch: int) -> int:
        """Samples that are evaluated on and never trained on."""
        return self.evaluate_batches * global_batch if self.evaluate_every else 0

    def check(self) -> None:
        """What cannot go together."""
        needs = {"--resume": self.resume, "--auto-resume": self.auto_resume, "--save-every": self.save_every}
        for option, given in needs.items():
            if given and not self.output:
                raise InputError("needs the run's folder", field=option, valid="--output FOLDER")
        if self.resume and self.init_from:
            raise InputError("a run that goes on has its own weights", field="--init-from", valid="without --resume")
