"""What decides the length of a step, in sentences: the largest share first, each with what would help."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.observe.analysis import Analysis
from meshwright.observe.job.steps import PARTS
from meshwright.observe.job.table import CollectiveRow
from meshwright.observe.rank.classes import CLASSES
from meshwright.observe.report.words import percent, ranks_text, seconds
from meshwright.units import size

LEAST = 0.03  # of the step: less is not worth a sentence


@dataclass(frozen=True)
class Finding:
    """One sentence of a diagnosis."""

    share: float  # of the step, 0 to 1
    what: str
    advice: str


@dataclass(frozen=True)
class Shares:
    """The mean step over ranks and steps; shares of the parts add up to 1."""

    step: float  # nanoseconds
    parts: dict[str, float]
    hidden: float  # communication behind computing, beside the parts


def shares_of(found: Analysis) -> Shares:
    """Where the mean step went; all zero where nothing worked."""
    parts = found.across.parts
    whole = int(parts.length.sum())
    present = int(parts.present.sum())
    every = {name: int(getattr(parts, name).sum()) / whole if whole else 0.0 for name in PARTS}
    return Shares(whole / present if present else 0.0, every, int(parts.hidden.sum()) / whole if whole else 0.0)


def diagnose(found: Analysis) -> tuple[Finding, ...]:
    """Findings by the share of the step that they are about."""
    shares = shares_of(found)
    every = [*_collectives(found), *_pipeline(found, shares), *_host(found, shares), *_rest(shares)]
    return tuple(sorted((one for one in every if one.share >= LEAST), key=lambda one: -one.share))


def _collectives(found: Analysis) -> Iterator[Finding]:
    """Exposed transfer and waiting, by group and kind over all sizes."""
    whole = max(int(found.across.parts.length.sum()), 1)
    rows: dict[tuple[str, str], list[CollectiveRow]] = defaultdict(list)
    for row in found.across.table:
        rows[row.group, row.kind].append(row)
    for (group, kind), mine in rows.items():
        crosses = {row.crosses_nodes for row in mine}
        where = " between nodes" if True in crosses else " within nodes" if crosses == {False} else ""
        exposed = sum(row.exposed_transfer for row in mine)
        main = max(mine, key=lambda row: row.exposed_transfer)
        rate = f", most of it at {main.busbw:.3g} GB/s per link" if main.busbw else ""
        mean = f"{_sizes(main)} a call{rate}"
        word = kind.replace("_", "-")
        yield Finding(
            exposed / whole,
            f"is exposed {word} of {group}{where} ({mean})" if _sizes(main) else f"is exposed {word} of {group}{where}",
            _ADVICE.get(kind, "overlap it with computing, or move less"),
        )
        waits = sum(row.exposed_waiting for row in mine)
        yield Finding(
            waits / whole,
            f"ranks wait in {word} of {group} for others to arrive{_last(found, group, kind)}",
            "look at what the late ranks do before: balance their work, or find what slows them",
        )


_ADVICE = {
    "all_gather": "gather earlier (prefetch the next layer), shard over fewer ranks, or keep parameters gathered",
    "reduce_scatter": "overlap it with the backward pass, accumulate over more micro-batches, or reduce in 16 bits",
    "all_reduce": "overlap it with the backward pass (larger buckets), accumulate longer, or compress gradients "
    "(meshwright compress explain)",
    "all_to_all": "route to fewer ranks, or overlap dispatch and combine with the experts",
    "send_recv": "use more micro-batches or another schedule",
}


def _sizes(row: CollectiveRow) -> str:
    if row.at_least is None:
        return ""
    return f"{size(row.at_least)} to {size(row.below)}" if row.below else f"over {size(row.at_least)}"


def _last(found: Analysis, group: str, kind: str) -> str:
    """Who arrives last most often, where that is more often than chance."""
    late = found.across.aligned.late
    known = late[late >= 0]
    if not len(known) or len(found.across.ranks) < 2:
        return ""
    counts = np.bincount(known, minlength=len(found.across.ranks))
    worst = int(counts.argmax())
    share = counts[worst] / len(known)
    if share < 2 / len(found.across.ranks) and share < 0.5:
        return ""
    return f"; {ranks_text([found.across.ranks[worst]])} is the last in {percent(share)} of all calls"


def _pipeline(found: Analysis, shares: Shares) -> Iterator[Finding]:
    stages = {stage for stage in found.across.pipeline.stage if stage is not None}
    yield Finding(
        shares.parts["bubble"],
        f"is pipeline bubble over {len(stages)} stages" if stages else "is pipeline bubble",
        "more micro-batches, interleaved stages or a zero-bubble schedule (meshwright plan weighs them)",
    )


def _host(found: Analysis, shares: Shares) -> Iterator[Finding]:
    """Devices without work: say how small the kernels are, since that decides what helps."""
    if all(device.device == "host" for facts in found.ranks for device in facts.devices):
        yield Finding(
            shares.parts["host_bound"],
            "passes outside of operators and exchanges: in Python, in the input pipeline, or waiting unseen",
            "record Python's stacks (with_stack=True) to see where; torch.compile removes most of what is between operators",
        )
        return
    kernels = [kernel for facts in found.ranks for kernel in facts.kernels]
    count, total = sum(kernel.count for kernel in kernels), sum(kernel.total for kernel in kernels)
    small = f" (a kernel lasts {seconds(total / count)} on average)" if count else ""
    yield Finding(
        shares.parts["host_bound"],
        f"devices idle because the host has not issued what comes next{small}",
        "CUDA graphs or torch.compile, larger micro-batches, fewer synchronisations (.item(), .cpu(), printing the loss), "
        "a faster input pipeline",
    )


def _rest(shares: Shares) -> Iterator[Finding]:
    yield Finding(
        shares.parts["copies"],
        "is copies between host and device (or fills) that nothing hides",
        "pin the host's memory and copy with non_blocking=True on a stream of its own",
    )
    yield Finding(
        shares.parts["idle"],
        "devices idle though work is issued: it waits for other streams, or for launches themselves",
        "look at the waits between streams (meshwright analyze --perfetto)",
    )


def computing(found: Analysis) -> tuple[tuple[str, float], ...]:
    """Shares of computing by class of kernel, the largest first; kernels side by side count each on its own."""
    sums = np.zeros(len(CLASSES))
    for facts in found.ranks:
        if facts.devices and facts.devices[0].device != "host":
            sums += facts.devices[0].by_class.sum(axis=0)
    order = np.argsort(-sums)
    return tuple((CLASSES[place], float(sums[place] / sums.sum())) for place in order if sums[place] > 0)
