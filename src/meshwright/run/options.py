"""Options of a training run: length, data, learning rate, outputs."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from msgspec import Meta

from meshwright.base.tables import Table
from meshwright.errors import InputError


def _option(description: str, **how: Any) -> Meta:
    """Return what the command line and the documentation say of a field, and its valid range.

    `option`: its name there, if not the field's; `python_only`: it has none; `metavar`, `short`: as click takes them.
    """
    extra: dict[str, Any] = {
        name: how.pop(name) for name in ("option", "short", "metavar", "python_only") if name in how
    }
    return Meta(description=description, extra=extra, **how)


class Training(Table, frozen=True, kw_only=True):
    """Options of one run. `plan.json` says how it is parallel, this says what is trained.

    The command line (`cli/running/training_options.py`) and the table in docs/train.md are made from these fields.

    >>> Training(steps=10).rate_at(0) < Training(steps=10).rate_at(1)
    True
    """

    steps: Annotated[int, _option("Steps to train, in all.", ge=1)]
    data: Annotated[str, _option("synthetic, a prepared folder, or a text, JSONL or Parquet file.")] = "synthetic"
    seed: Annotated[int, _option("Of fresh weights and of the order of samples.", ge=0, le=2**63 - 1)] = 0
    lr: Annotated[float, _option("Highest learning rate.", gt=0, lt=1e38)] = 3e-4
    warmup: Annotated[int, _option("Steps over which the rate rises.", ge=0)] = 2
    decay: Annotated[Literal["cosine", "linear", "constant"], _option("How the rate falls.")] = "cosine"
    clip: Annotated[float, _option("Largest norm of all gradients; 0: any.", ge=0, lt=1e38)] = 1.0
    weight_decay: Annotated[float, _option("Of matrices; norms and biases do not decay.", ge=0, lt=1e38)] = 0.1
    balance: Annotated[
        Literal["sample", "batch"],
        _option("What the balance loss of a mixture is of: every sample, or the whole batch."),
    ] = "sample"
    evaluate_every: Annotated[int, _option("Steps between evaluations; 0: none.", option="--eval-every", ge=0)] = 0
    evaluate_batches: Annotated[int, _option("Batches of an evaluation.", python_only=True, ge=1)] = 4
    output: Annotated[
        str, _option("The run's folder: plan, events, checkpoints; else nothing is written.", short="-o")
    ] = ""
    save_every: Annotated[int, _option("Steps between checkpoints; 0: one at the end.", ge=0)] = 0
    keep: Annotated[int, _option("Checkpoints to keep.", ge=1)] = 2
    resume: Annotated[bool, _option("Go on from the last whole checkpoint of --output, under any plan.")] = False
    auto_resume: Annotated[
        bool, _option("The same where there is one, else begin: for jobs that are started again.")
    ] = False
    init_from: Annotated[str, _option("First weights: a folder with Hugging Face safetensors.")] = ""
    export: Annotated[str, _option("Write the trained model there, as transformers reads it.")] = ""
    lora: Annotated[int, _option("Train adapters of this rank, not the weights; 0: the weights.", ge=0)] = 0
    dynamic: Annotated[
        bool, _option("Every product in the coarsest type that will do.", option="--dynamic-precision")
    ] = False
    guard: Annotated[bool, _option("Leave out steps whose loss is far too high.")] = True
    wait: Annotated[
        float,
        _option(
            "How long a rank may let others wait before the run fails; 0: 20 predicted steps, 300 at least.",
            metavar="SECONDS", ge=0, lt=1e38,
        ),
    ] = 0.0  # fmt: skip
    profile: Annotated[str, _option("Write a trace of three steps per process to this folder.")] = ""

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
        """Refuse options that contradict each other."""
        needs = {"--resume": self.resume, "--auto-resume": self.auto_resume, "--save-every": self.save_every}
        for option, given in needs.items():
            if given and not self.output:
                raise InputError("needs the run's folder", field=option, valid="--output FOLDER")
        if self.resume and self.init_from:
            raise InputError("a run that goes on has its own weights", field="--init-from", valid="without --resume")
