"""`Plan`: the versioned JSON document of a plan, validated on load and written for people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from meshwright.base.files import parse_json, pretty_json, read_json, write_text
from meshwright.base.tables import Table
from meshwright.plans.job import Job, WrittenJob
from meshwright.plans.schedule import Schedule
from meshwright.plans.spans import device_ranks
from meshwright.plans.strategy import DEFAULT_ORDER, Offload, Span

FORMAT: Final = "meshwright-plan"
VERSION = 1
WIDTH = 100  # characters; a span of layers stays on one line, however long


class Stage(Table, frozen=True, kw_only=True):
    """Consecutive layers on one set of devices, cut into spans that share a strategy."""

    devices: Annotated[str, Meta(description="device numbers: 0-31, or 0-7,16-23, or 0-62/2")]
    spans: Annotated[tuple[Span, ...], Meta(min_length=1)]

    @property
    def ranks(self) -> tuple[int, ...]:
        return device_ranks(self.devices)


class Pipeline(Table, frozen=True, kw_only=True):
    """A replica of the whole model, cut into stages, with its own part of the batch."""

    batch: Annotated[int, Meta(ge=1, description="samples of the global batch that this pipeline trains on")]
    micro_batches: Annotated[int, Meta(ge=1, description="pieces that the batch is cut into")]
    stages: Annotated[tuple[Stage, ...], Meta(min_length=1)]
    schedule: Schedule = Schedule()

    @property
    def samples(self) -> int:
        """Samples in one micro-batch, over all replicas of a stage."""
        return self.batch // self.micro_batches


class Compression(Table, frozen=True, kw_only=True):
    """Gradients of some layers that travel compressed."""

    layers: str
    algorithm: Annotated[str, Meta(min_length=1)]
    options: dict[str, float | str] = {}


class Overlap(Table, frozen=True, kw_only=True):
    """Overlap of communication with computation; each kind can be switched off to see its worth."""

    gradients: Annotated[bool, Meta(description="summed over replicas while the backward pass goes on")] = True
    parameters: Annotated[bool, Meta(description="shards of the next layer are gathered ahead of their use")] = True
    pipeline: Annotated[bool, Meta(description="work goes on while activations and their gradients arrive")] = True
    tensor_chunks: Annotated[
        int, Meta(ge=1, le=64, description="chunks of tokens whose sums travel under the next product; 1: whole")
    ] = 1


class Backup(Table, frozen=True, kw_only=True):
    """Backup of the training state against the loss of a node."""

    scheme: Literal["checkpoint", "neighbour", "parity"]
    every: Annotated[int, Meta(ge=1, description="steps between two backups")] = 1
    options: dict[str, float | str] = {}


class Plan(Table, frozen=True, kw_only=True):
    """Document that says which devices train which layers how. `Plan.load` reads one, `save` writes it.

    >>> job = {"model": "tiny-llama", "cluster": "4xcpu", "global_batch": 8, "precision": "fp32"}
    >>> plan = Plan.of({**job, "tp": 2, "pp": 2})
    >>> len(plan.pipelines[0].stages), plan.pipelines[0].stages[1].devices
    (2, '2-3')
    """

    job: WrittenJob
    pipelines: Annotated[tuple[Pipeline, ...], Meta(min_length=1)]
    format: Literal["meshwright-plan"] = FORMAT
    version: Annotated[int, Meta(ge=1)] = VERSION
    schema: Annotated[str, Meta(description="for editors")] = msgspec.field(default="", name="$schema")
    compression: tuple[Compression, ...] = ()
    backup: Backup | None = None
    overlap: Overlap = Overlap()
    search: dict[str, Any] | None = None
    estimate: dict[str, Any] | None = None

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan in full or short form, check it against every rule, and return it."""
        return Plan.of(read_json(path), file=str(path))

    @staticmethod
    def of(table: object, job: Job | None = None, file: str = "") -> Plan:
        """Return the plan of a document's contents; the short form may take the job from the argument.

        A model or cluster named by path is looked up beside `file` and becomes part of the plan, so that the plan needs
        no other file.
        """
        from meshwright.plans.reading import read_plan

        return read_plan(table, job, file)[0]

    @staticmethod
    def parse(text: str) -> Plan:
        """Return the plan of JSON text."""
        return Plan.of(parse_json(text))

    def to_table(self) -> dict[str, Any]:
        """Return the full form as plain dicts and lists, in the order people read."""
        table: dict[str, Any] = {"$schema": self.schema} if self.schema else {}
        table |= {"format": self.format, "version": self.version}
        table["job"] = _plain(self.job)
        table["pipelines"] = [_pipeline_table(pipeline) for pipeline in self.pipelines]
        for name in ("compression", "backup", "overlap", "search", "estimate"):
            value = getattr(self, name)
            if value not in (None, (), Overlap()):
                table[name] = _plain(value)
        return table

    def to_json(self) -> str:
        return pretty_json(self.to_table(), WIDTH, one_line=lambda value: isinstance(value, dict) and "dp" in value)

    def save(self, path: str | Path) -> None:
        """Write the document; an existing file is replaced whole or not at all."""
        write_text(path, self.to_json())

    def resolve(self) -> Job:
        """Return the job with its model and cluster found."""
        return self.job.resolve()

    @property
    def devices(self) -> int:
        """Number of devices in use."""
        return len(self.used)

    @property
    def used(self) -> tuple[int, ...]:
        """Devices in use, in the cluster's order: process i of a run uses the i-th."""
        return tuple(sorted({device for p in self.pipelines for stage in p.stages for device in stage.ranks}))


def _plain(value: object) -> Any:
    """Return lists, dicts and numbers, as JSON knows them."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _pipeline_table(pipeline: Pipeline) -> dict[str, Any]:
    schedule: dict[str, Any] = {"name": pipeline.schedule.name, "virtual": pipeline.schedule.virtual}
    if pipeline.schedule.table:
        schedule["table"] = [list(row) for row in pipeline.schedule.table]
    stages = [{"devices": s.devices, "spans": [_span_table(span) for span in s.spans]} for s in pipeline.stages]
    return {
        "batch": pipeline.batch,
        "micro_batches": pipeline.micro_batches,
        "schedule": schedule,
        "stages": stages,
    }


def _span_table(span: Span) -> dict[str, Any]:
    """Return a span's table: degrees always, rarer choices only where they differ from the default."""
    names = ("layers", "dp", "zero", "tp", "sp", "ulysses", "ring", "ep", "etp", "recompute")
    table = {name: _plain(getattr(span, name)) for name in names}
    if span.zero_group:
        table["zero_group"] = span.zero_group
    if span.offload != Offload():
        table["offload"] = _plain(span.offload)
    if span.swap:
        table["swap"] = _plain(span.swap)
    if span.order != DEFAULT_ORDER:
        table["order"] = list(span.order)
    if span.shares:
        table["shares"] = list(span.shares)
    return table
