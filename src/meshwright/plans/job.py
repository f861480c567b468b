"""`Job`: one model on one cluster with one batch; and its form in a plan document."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from meshwright.base.tables import Table
from meshwright.clusters import Cluster
from meshwright.errors import InputError, UnknownName
from meshwright.models import Model, precision

LARGEST_BATCH = 10_000_000  # samples per step
LARGEST_SEQUENCE = 100_000_000  # tokens per sample

# Bytes of optimizer state per parameter, without the master copy that the precision needs.
OPTIMIZERS = {
    "adamw": 8.0,  # two float32 moments
    "adamw-16bit": 4.0,  # two bfloat16 moments (Megatron-Core's precision-aware optimizer)
    "adamw-8bit": 2.0,  # two 8-bit moments (Dettmers et al., 2022)
    "muon": 4.0,  # one float32 momentum
    "sgd-momentum": 4.0,
    "sgd": 0.0,
}


@dataclass(frozen=True)
class Job:
    """Model, cluster and batch of a training job.

    >>> job = Job(Model.preset("llama3-70b"), Cluster.preset("8x8xh100"), global_batch=512, seq_len=8192)
    >>> job.tokens_per_step
    4194304
    """

    model: Model
    cluster: Cluster
    global_batch: int  # samples per optimizer step
    seq_len: int = 0  # tokens per sample; 0: the model's default
    precision: str = "bf16"
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        _in_range("global_batch", self.global_batch, LARGEST_BATCH)
        if self.seq_len == 0:
            object.__setattr__(self, "seq_len", self.model.default_seq_len())
        _in_range("seq_len", self.seq_len, LARGEST_SEQUENCE)
        try:
            self.model.check_seq_len(self.seq_len)
        except InputError as error:
            raise error.at(field="seq_len") from None
        try:
            precision(self.precision)
        except InputError as error:
            raise error.at(field="precision") from None
        if self.optimizer not in OPTIMIZERS:
            raise UnknownName("optimizer", self.optimizer, OPTIMIZERS, see=", ".join(OPTIMIZERS)).at(field="optimizer")

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    def written(self) -> WrittenJob:
        """Return the job as a plan document holds it."""
        return WrittenJob(
            model=_plain_reference(self.model.reference or self.model.name),
            cluster=_plain_reference(self.cluster.reference or self.cluster.name),
            global_batch=self.global_batch,
            seq_len=self.seq_len,
            precision=self.precision,
            optimizer=self.optimizer,
        )


class WrittenJob(Table, frozen=True, kw_only=True):
    """The job inside a plan: model and cluster by name, by path, or written out."""

    model: Annotated[str | dict[str, Any], Meta(description="preset name, path of a config.json, or its contents")]
    cluster: Annotated[str | dict[str, Any], Meta(description="8x8xh100, path of a .toml file, or its contents")]
    global_batch: Annotated[int, Meta(ge=1, le=LARGEST_BATCH, description="samples per optimizer step")]
    seq_len: Annotated[int, Meta(ge=0, le=LARGEST_SEQUENCE, description="tokens per sample")] = 0
    precision: str = "bf16"
    optimizer: str = "adamw"

    def resolve(self, folder: str = "", field: str = "job") -> Job:
        """Find the model and the cluster that this document names; paths are relative to `folder`."""
        model = _inside(f"{field}.model", lambda: Model.load(_beside(self.model, folder)))
        cluster = _inside(f"{field}.cluster", lambda: Cluster.load(_beside(self.cluster, folder)))
        return _inside(
            field, lambda: Job(model, cluster, self.global_batch, self.seq_len, self.precision, self.optimizer)
        )


T = TypeVar("T")


def _inside(field: str, make: Callable[[], T]) -> T:
    """Run `make` and place its errors: one in a file of its own (a config.json) keeps it, others get `field`."""
    try:
        return make()
    except InputError as error:
        if not error.file:
            error.field = ".".join(part for part in (field, error.field) if part).lstrip(".")
        raise


def _beside(what: str | dict[str, Any], folder: str) -> str | dict[str, Any]:
    """Return a path relative to the document's folder, if something is there."""
    if isinstance(what, str) and folder and os.path.exists(os.path.join(folder, what)):
        return os.path.join(folder, what)
    return what


def _plain_reference(reference: str | Mapping[str, Any]) -> str | dict[str, Any]:
    return reference if isinstance(reference, str) else dict(reference)


def _in_range(field: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InputError(f"is {value!r}", field=field, valid=f"an integer from 1 to {most:,}")
