"""Diagnosis of a step's length in sentences: the largest share first, each with advice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshwright.base.units import size
from meshwright.traces.analysis import Analysis
from meshwright.traces.job.collective_table import CollectiveRow, label
from meshwright.traces.job.steps import PARTS
from meshwright.traces.job.stragglers.stragglers import EVERYTHING
from meshwright.traces.page.words import percent, ranks_text, seconds
from meshwright.traces.rank.collectives import KINDS
from meshwright.traces.rank.kernel_classes import CLASSES

OUTSIDE = "outside operators"  # as host_bound.py names time in no operator
LEAST = 0.03  # share of the step; less gets no sentence
HICCUP = 5  # times the waiting that others cause in a call: a single event, not noise
FAR_BELOW = 0.5  # share of the device's capability below which a product counts as slow


@dataclass(frozen=True)
class Finding:
    """One sentence of a diagnosis."""

    share: float  # of the step, 0 to 1, that it concerns or would save
    what: str
    advice: str


def of_step(share: float, what: str, advice: str) -> Finding:
    return Finding(share, f"{percent(share)} of the step: {what}.", advice)


@dataclass(frozen=True)
class Shares:
    """Mean step over ranks and steps; shares of the parts add up to 1."""

    step: float  # nanoseconds
    parts: dict[str, float]
    hidden: float  # overlapped communication, beside the parts


def shares_of(found: Analysis) -> Shares:
    """Return the shares of the mean step; all zero if nothing worked."""
    parts = found.across.parts
    whole = int(parts.length.sum())
    present = int(parts.present.sum())
    every = {name: int(getattr(parts, name).sum()) / whole if whole else 0.0 for name in PARTS}
    return Shares(whole / present if present else 0.0, every, int(parts.hidden.sum()) / whole if whole else 0.0)


def diagnose(found: Analysis) -> tuple[Finding, ...]:
    """Return findings, sorted by the share of the step that they concern."""
    shares = shares_of(found)
    every = [*_collectives(found), *_pipeline(found, shares), *_host(found, shares), *_rest(shares), *_products(found)]
    shown = [*(one for one in every if one.share >= LEAST), *_stragglers(found)]
    return tuple(sorted(shown, key=lambda one: -one.share))


def _collectives(found: Analysis) -> Iterator[Finding]:
    """Report exposed transfer and waiting, by group and kind over all sizes."""
    whole = max(int(found.across.parts.length.sum()), 1)
    rows: dict[tuple[str, str], list[CollectiveRow]] = defaultdict(list)
    for row in found.across.table:
        rows[row.group, row.kind].append(row)
    for (group, kind), mine in rows.items():
        crosses = {row.crosses_nodes for row in mine}
        where = " between nodes" if True in crosses else " within nodes" if crosses == {False} else ""
        exposed = sum(row.exposed_transfer for row in mine)
        main = max(mine, key=lambda row: row.exposed_transfer)
        rate = f", {main.busbw:.3g} GB/s of bus bandwidth" if main.busbw and main.busbw >= 0.01 else ""
        mean = f"{_sizes(main)} a call{rate}"
        word = "communication" if kind == "other" else kind.replace("_", "-")
        yield of_step(
            exposed / whole,
            f"exposed {word} of {group}{where} ({mean})" if _sizes(main) else f"exposed {word} of {group}{where}",
            _ADVICE.get(kind, "overlap it with computing, or move less"),
        )
        waits = sum(row.exposed_waiting for row in mine)
        yield of_step(
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
    """Return the rank that causes most of the waiting in some collectives, unless noise or chance explains it."""
    aligned, ranks = found.across.aligned, found.across.ranks
    matched = aligned.matched
    kinds = np.full(len(matched.group), -1)
    kinds[matched.call] = matched.kind
    sizes = np.zeros(len(matched.groups), np.int64)
    np.maximum.at(sizes, matched.group, matched.size)
    mine = np.array([label(one, int(size)) == group for one, size in zip(matched.groups, sizes, strict=True)], np.bool_)
    caused = np.bincount(matched.call, aligned.waiting - aligned.bubble, minlength=len(matched.group))
    chosen = (aligned.late >= 0) & (kinds == KINDS.index(kind)) & mine[matched.group]
    late, caused = aligned.late[chosen], caused[chosen]
    if len(late) < 2 or not caused.sum():
        return ""
    by_rank = np.bincount(late, caused, minlength=len(ranks))
    worst = int(by_rank.argmax())
    share, times = by_rank[worst] / caused.sum(), int((late == worst).sum())
    unusual = (
        caused[late == worst].max() >= HICCUP * np.median(caused[late != worst]) if (late != worst).any() else True
    )
    if share < 0.5 or not (unusual or len(ranks) * _chance(times, len(late), 1 / len(ranks)) < 0.01):
        return ""
    return f"; rank {ranks[worst]} causes {percent(share)} of it, the last in {times} of {len(late)} calls"


def _chance(times: int, of: int, each: float) -> float:
    """Return the probability that one rank is last this often, or more, if all are alike (binomial)."""
    return sum(math.comb(of, k) * each**k * (1 - each) ** (of - k) for k in range(times, of + 1))


def _stragglers(found: Analysis) -> Iterator[Finding]:
    """Report every straggler, however low its cost."""
    for one in found.stragglers.found:
        since = f" since step {one.since}" if one.since is not None else ""
        costs = f"; without that a step would be {seconds(one.costs)} shorter" if one.costs else ""
        who, many = ranks_text(one.ranks).capitalize(), len(one.ranks) > 1
        who += f" (all of {one.host})" if one.host else ""
        if one.cause == "compute":
            verb = "compute" if many else "computes"
            where = "" if one.where == EVERYTHING else f" in {one.where}"
            what = f"{who} {verb} {percent(one.slower)} slower{where} than ranks that do the same{since}{costs}."
            advice = "check clocks, temperature and power of the device, and what else runs on its machine; replace it"
        elif one.cause == "host":
            what = f"{who} {'issue' if many else 'issues'} work late ({percent(one.slower)} of a step){since}{costs}."
            advice = (
                "look for what its host does besides: input pipeline, checkpoints, garbage collection, other processes"
            )
        elif one.cause == "link":
            where = f"where {ranks_text(one.ranks)} {'take' if many else 'takes'} part"
            what = f"{one.where} is {percent(one.slower)} slower {where}{costs}."
            advice = "check the links of these machines, and what else uses them"
        else:
            where = f"Stage {one.stage} ({ranks_text(one.ranks)})"
            what = f"{where} computes {percent(one.slower)} longer than other stages{costs}."
            advice = "move layers to other stages (meshwright plan balances them with what was measured)"
        yield Finding(one.costs / max(found.stragglers.step, 1), what, advice)


def _products(found: Analysis) -> Iterator[Finding]:
    """Report operators far below their device's capability, if shapes determine their work."""
    whole = max(int(found.across.parts.length.sum()), 1)
    slow: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for facts in found.ranks:
        for row in facts.costs.shaped:
            if row.share and facts.devices and facts.devices[0].device != "host":
                slow[row.name, row.dims, row.bound][0] += row.time
                slow[row.name, row.dims, row.bound][1] += row.time * (1 - min(row.share, 1.0))
    for (name, dims, bound), (time, lost) in slow.items():
        if lost / max(time, 1) >= FAR_BELOW:
            best = "its memory" if bound == "memory" else "its arithmetic"
            yield of_step(
                lost / whole,
                f"lost in {name} of {dims}, which reaches {percent(1 - lost / time)} of what {best} allows",
                "choose sizes that are multiples of 128, a lower precision, or fuse it with its neighbours (torch.compile)",
            )


def _pipeline(found: Analysis, shares: Shares) -> Iterator[Finding]:
    stages = {stage for stage in found.across.pipeline.stage if stage is not None}
    yield of_step(
        shares.parts["bubble"],
        f"pipeline bubble over {len(stages)} stages" if stages else "pipeline bubble",
        "more micro-batches, interleaved stages or a zero-bubble schedule (meshwright plan weighs them)",
    )


def _host(found: Analysis, shares: Shares) -> Iterator[Finding]:
    """Report idle devices, with the size of kernels, since that determines the remedy."""
    if all(device.device == "host" for facts in found.ranks for device in facts.devices):
        yield of_step(
            shares.parts["host_bound"],
            "outside of operators and exchanges: in Python, in the input pipeline, or waiting unseen",
            "record Python's stacks (with_stack=True) to see where; torch.compile removes most of what is between operators",
        )
        return
    devices = [facts.devices[0] for facts in found.ranks if facts.devices]
    count, total = (sum(int(getattr(one, name).sum()) for one in devices) for name in ("launched", "by_class"))
    small = f" (a kernel that computes lasts {seconds(total / count)} on average{_meanwhile(found)})" if count else ""
    yield of_step(
        shares.parts["host_bound"],
        f"devices idle because the host has not issued what comes next{small}",
        "CUDA graphs or torch.compile, larger micro-batches, fewer synchronisations (.item(), .cpu(), printing the loss), "
        "a faster input pipeline",
    )


def _meanwhile(found: Analysis) -> str:
    """Return the host's main activity in the stretches in which devices wait for it."""
    spent: dict[str, int] = defaultdict(int)
    idle = synced = 0
    for facts in found.ranks:
        for stretch in facts.devices[0].launches.stretches if facts.devices else ():
            idle, synced = idle + stretch.idle, synced + stretch.synchronised
            for name, time in stretch.filled_by:
                spent[name] += time
    if 2 * synced > idle:
        return "; the host mostly waits for the device in between"
    most = max(spent, key=lambda name: spent[name], default="")
    if not most or 3 * spent[most] <= sum(spent.values()):
        return ""
    return f"; meanwhile the host is mostly {most if most == OUTSIDE else f'in {most}'}"


def _rest(shares: Shares) -> Iterator[Finding]:
    yield of_step(
        shares.parts["copies"],
        "copies between host and device (or fills) that nothing hides",
        "pin the host's memory and copy with non_blocking=True on a stream of its own",
    )
    yield of_step(
        shares.parts["idle"],
        "devices idle though work is issued: it waits for other streams, or for launches themselves",
        "look at the waits between streams (meshwright analyze --perfetto)",
    )


def computing(found: Analysis) -> tuple[tuple[str, float], ...]:
    """Return shares of computing by class of kernel, largest first; concurrent kernels count separately."""
    sums = np.zeros(len(CLASSES))
    for facts in found.ranks:
        if facts.devices and facts.devices[0].device != "host":
            sums += facts.devices[0].by_class.sum(axis=0)
    order = np.argsort(-sums)
    return tuple((CLASSES[place], float(sums[place] / sums.sum())) for place in order if sums[place] > 0)
