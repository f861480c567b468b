"""Picture of a plan for the terminal: stages over layers, coloured by strategy, with memory bars."""

from __future__ import annotations

import string
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from meshwright.base.units import size
from meshwright.plans.document import Pipeline, Plan
from meshwright.plans.job import Job
from meshwright.plans.schedule import group_of_stage
from meshwright.plans.spans import layer_range
from meshwright.plans.stored_estimate import MEMORY_PARTS, StageMemory
from meshwright.plans.strategy import DEFAULT_ORDER, Offload, Span

# Dark enough for white letters, distinct for colour-blind readers; the letters carry the same information.
_COLOURS = ("#3b6ea8", "#c4622d", "#3a7d44", "#8e4585", "#2a8b8b", "#7d7a2c", "#a83b3b", "#6b6b6b")
_BAR = 40


def draw(plan: Plan, job: Job, memory: Sequence[StageMemory], width: int = 100) -> Group:
    """Return the whole picture, ready for `rich.print`."""
    letters = _letters(plan)
    parts: list[Text | RichTable] = [_title(plan, job), Text()]
    place = 0
    for number, pipeline in enumerate(plan.pipelines):
        groups = len(pipeline.stages) // pipeline.schedule.virtual
        parts += [_heading(pipeline, number, len(plan.pipelines)), _map(pipeline, job, letters, groups, width), Text()]
        parts += [draw_memory(memory[place : place + groups], width), Text()]
        place += groups
    parts.append(_legend(letters))
    return Group(*parts)


def strategy_text(span: Span) -> str:
    """Return a strategy in one line: only the enabled options.

    >>> strategy_text(Span(layers="all", dp=8, tp=4, sp=True, zero=1))
    'dp 8, zero 1, tp 4 + sp'
    """
    words = [f"dp {span.dp}"] if span.dp > 1 else []
    if span.zero:
        words.append(f"zero {span.zero}" + (f" in groups of {span.zero_group}" if span.zero_group else ""))
    if span.tp > 1:
        words.append(f"tp {span.tp}" + (" + sp" if span.sp else ""))
    words += [f"{name} {value}" for name in ("ulysses", "ring", "ep", "etp") if (value := getattr(span, name)) > 1]
    if span.recompute != "none":
        chosen = span.recompute if isinstance(span.recompute, str) else "+".join(span.recompute)
        words.append(f"recompute {chosen}")
    if span.offload != Offload():
        moved = {n: getattr(span.offload, n) for n in ("activations", "optimizer", "parameters")}
        words.append("offload " + " + ".join(f"{v:.0%} {n}" for n, v in moved.items() if v))
    if span.swap:
        words.append(f"swap {span.swap.activations:.0%} to stage {span.swap.to}")
    if span.order != DEFAULT_ORDER:
        words.append("-".join(span.order))
    if span.shares:
        words.append("shares " + ":".join(map(str, span.shares)))
    return ", ".join(words) or "one device"


def _letters(plan: Plan) -> dict[str, str]:
    texts = dict.fromkeys(strategy_text(span) for p in plan.pipelines for stage in p.stages for span in stage.spans)
    symbols = string.ascii_uppercase + string.ascii_lowercase + string.digits
    return {text: symbols[i] if i < len(symbols) else "#" for i, text in enumerate(texts)}


def _colour(letters: dict[str, str], text: str) -> str:
    return _COLOURS[list(letters).index(text) % len(_COLOURS)]


def _title(plan: Plan, job: Job) -> Text:
    title = Text(f"{job.model.name} on {job.cluster.name}", style="bold")
    samples = f"{job.global_batch} x {job.seq_len} tokens" if job.seq_len > 1 else f"{job.global_batch} samples"
    title.append(f"   batch {samples}, {job.precision}, {job.optimizer}", style="not bold")
    idle = job.cluster.devices - plan.devices
    title.append(f"   {plan.devices} devices" + (f", {idle} idle" if idle else ""), style="not bold")
    return title


def _heading(pipeline: Pipeline, number: int, count: int) -> Text:
    name = f"pipeline {number}: " if count > 1 else ""
    stages = f"{len(pipeline.stages)} stage" + ("s" if len(pipeline.stages) > 1 else "")
    virtual = f" ({pipeline.schedule.virtual} per device group)" if pipeline.schedule.virtual > 1 else ""
    many, samples = pipeline.micro_batches != 1, pipeline.samples
    batches = f"{pipeline.micro_batches} micro-batch{'es' if many else ''} of {samples} sample{'s' * (samples != 1)}"
    return Text(f"{name}{stages}{virtual}, {pipeline.schedule.name}, {batches}")


def _map(pipeline: Pipeline, job: Job, letters: dict[str, str], groups: int, width: int) -> RichTable:
    """Return one row per device group, one column per (bundle of) layers, and the strategy's letter in each cell."""
    count = len(job.model.layers)
    columns = min(max(width - 34, 20), count)
    table = RichTable(box=None, pad_edge=False, show_header=True, header_style="dim")
    table.add_column("devices", no_wrap=True)
    table.add_column(Text(f"{job.model.layers[0].name} ... {job.model.layers[-1].name} ({count} layers)"), no_wrap=True)
    table.add_column("layers", no_wrap=True)
    rows: list[list[str]] = [[""] * count for _ in range(groups)]
    spans: list[list[str]] = [[] for _ in range(groups)]
    for s, stage in enumerate(pipeline.stages):
        group = group_of_stage(pipeline.schedule, len(pipeline.stages), s)
        for span in stage.spans:
            found = layer_range(job.model, span.layers)
            rows[group][found.start : found.stop] = [strategy_text(span)] * len(found)
            spans[group].append(span.layers)
    for group in range(groups):
        bundled = [rows[group][i * count // columns] for i in range(columns)]
        cells = Text()
        for text in bundled:
            cells.append(letters[text] if text else "·", style=f"white on {_colour(letters, text)}" if text else "dim")
        shown = spans[group][0] if len(spans[group]) == 1 else f"{spans[group][0]} +{len(spans[group]) - 1}"
        table.add_row(Text(pipeline.stages[group].devices), cells, Text(shown))
    return table


def draw_memory(memory: Sequence[StageMemory], width: int) -> RichTable:
    """Return a bar per device group, full width = the device's memory, and report what does not fit."""
    labels = [_label(row) for row in memory]
    names = max(len("devices"), *(len(row.devices) for row in memory))
    room = width - names - max(len(label) for label in labels) - 6  # two blanks between columns
    table = RichTable(box=None, pad_edge=False, header_style="dim")
    for heading in ("devices", "memory per device", ""):
        table.add_column(heading, no_wrap=True)
    for row, label in zip(memory, labels, strict=True):
        table.add_row(Text(row.devices), _bar(row, max(min(_BAR, room), 12)), label)
    return table


def _label(row: StageMemory) -> Text:
    label = Text(f"{size(row.total)} of {size(row.capacity)}")
    if row.host:
        label.append(f" + {size(row.host)} on the host")
    if row.short_by:
        label.append(f"  short by {size(row.short_by)}", style="bold red")
    return label


def _bar(row: StageMemory, length: int) -> Text:
    """Return cells in proportion; every nonzero part gets one, taken from the part with most to spare."""
    scale = length / max(row.capacity, row.total)
    exact = {name: getattr(row, name) * scale for name, _, _ in MEMORY_PARTS}
    cells = {name: max(round(part), 1) if part else 0 for name, part in exact.items()}
    filled = min(max(round(row.total * scale), sum(map(bool, cells.values()))), length)
    while sum(cells.values()) != filled:  # one cell at a time, at the largest error
        step = 1 if sum(cells.values()) < filled else -1
        open_ = [name for name in cells if cells[name] + step >= 1]
        cells[max(open_, key=lambda name: step * (exact[name] - cells[name]))] += step
    bar = Text()
    for name, letter, colour in MEMORY_PARTS:
        bar.append(letter * cells[name], style=f"white on {colour}")
    return bar.append("·" * (length - sum(cells.values())), style="dim")


def _legend(letters: dict[str, str]) -> Text:
    legend = Text()
    for text, letter in letters.items():
        legend.append(f" {letter} ", style=f"white on {_colour(letters, text)}")
        legend.append(f" {text}\n")
    return legend.append_text(legend_of_memory())


def legend_of_memory() -> Text:
    """Return the meaning of the letters in the memory bars."""
    legend = Text()
    for name, letter, colour in MEMORY_PARTS:
        legend.append(f" {letter} ", style=f"white on {colour}")
        legend.append(f" {name.replace('_', ' ')}  ")
    return legend
