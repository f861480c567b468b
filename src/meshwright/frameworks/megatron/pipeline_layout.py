"""Blocks of each pipeline stage in Megatron's arguments: even, with separate first and last, or a layout.

A layout names the content of each stage, in the model's order: `Et*19|(t*20|)*2t*21L` has four stages. E is the
embedding, t a transformer block, L the loss (megatron/core/transformer/pipeline_parallel_layer_layout.py of
megatron-core 0.16.1). With several stages per device group, stage i is on group i modulo pp.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from meshwright.errors import shorten
from meshwright.frameworks.megatron.arguments import Arguments, Given

_LONGEST = 100_000  # characters of a layout with its repetitions expanded
_SPLIT = ("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank")
_UNEVEN = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers")
_ACCOUNT = ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split")


def stage_arguments(blocks: Sequence[int], groups: int) -> Arguments:
    """Return the shortest arguments: stages that are as equal as possible need no layout."""
    virtual = len(blocks) // groups
    if len(set(blocks)) > 1:
        return {"pipeline-model-parallel-layout": (layout_text(blocks),)}
    return {"num-virtual-stages-per-pipeline-rank": (str(virtual),)} if virtual > 1 else {}


def layout_text(blocks: Sequence[int]) -> str:
    """Return the layout of stages with these blocks.

    >>> layout_text([19, 20, 20, 21])
    'Et*19|(t*20|)*2t*21L'
    >>> layout_text([0, 1, 2, 0])
    'E|t|t*2|L'
    """
    first, last = f"E{_decoders(blocks[0])}", f"{_decoders(blocks[-1])}L"
    middle = ""
    for count, same in groupby(blocks[1:-1]):
        stages = len(list(same))
        middle += f"({_decoders(count)}|)*{stages}" if stages > 1 else f"{_decoders(count)}|"
    return f"{first}|{middle}{last}" if len(blocks) > 1 else f"E{_decoders(blocks[0])}L"


def _decoders(count: int) -> str:
    return "" if count == 0 else "t" if count == 1 else f"t*{count}"


def blocks_of_layout(given: Given, layers: int) -> tuple[int, ...]:
    """Return the blocks of each stage in a layout; layers that predict further tokens do not count."""
    name = "pipeline-model-parallel-layout"
    text = _written_out(given, name)
    stages = text.split("|")
    if wrong := sorted(set(text) - set("EtmL|")):
        raise given.refused(name, f"holds '{wrong[0]}'", "E, t, m and L, stages split by |, repeated by *")
    if not text.startswith("E") or text.count("E") != 1 or text.rstrip("|")[-1:] != "L" or text.count("L") != 1:
        raise given.refused(name, f"is {shorten(given.text(name), 40)}", "E first, L last, each once")
    if (blocks := text.count("t")) != layers:
        raise given.refused(name, f"has {blocks} blocks, but --num-layers is {layers}", f"{layers} times t")
    counts = tuple(stage.count("t") for stage in stages)
    if empty := [i for i, stage in enumerate(stages) if not set(stage) & set("EtL")]:
        raise given.refused(name, f"leaves stage {empty[0]} without a block", "at least one block in each stage")
    return counts


def _written_out(given: Given, name: str) -> str:
    """Expand repetitions, first of groups, then of single letters, and drop commas."""
    text = re.sub(r"[,\s]", "", given.text(name))
    for pattern in (r"\(([^()]+)\)\*(\d{1,4})", r"([EtmL|])\*(\d{1,4})"):
        size = sum(len(m[1]) * int(m[2]) for m in re.finditer(pattern, text))
        if size > _LONGEST:
            raise given.refused(name, f"has more than {_LONGEST:,} letters once it is written out")
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    return text


def blocks_of(given: Given, layers: int, groups: int) -> tuple[int, ...]:
    """Return the blocks of each stage in the model's order; contradictions are refused with both values."""
    layout = "pipeline-model-parallel-layout"
    _only_one(given, (layout, *_SPLIT), (layout, *_UNEVEN, *_ACCOUNT))
    if layout in given:
        counts = blocks_of_layout(given, layers)
        if len(counts) % groups:
            problem = f"has {len(counts)} stages, but --pipeline-model-parallel-size is {groups}"
            raise given.refused(layout, problem, f"a multiple of {groups} stages")
        return counts
    ranks = _layers_of_ranks(given, layers, groups)
    virtual = _virtual(given, ranks)
    counts_of_chunks = [count // virtual for count in ranks]
    counts = tuple(counts_of_chunks * virtual)
    return _accounted(given, counts)


def _only_one(given: Given, *sets: tuple[str, ...]) -> None:
    for names in sets:
        said = [name for name in names if name in given]
        if (len(said) > 1 and said[0] == names[0]) or (len(said) > 1 and set(said) <= set(_SPLIT)):
            both = [f"--{name} {shorten(' '.join(given.words(name)), 40)}".strip() for name in said[:2]]
            raise given.refused(said[0], f"{both[0]} contradicts {both[1]}", "one of the two")


def _layers_of_ranks(given: Given, layers: int, groups: int) -> list[int]:
    """Return the blocks of each device group; embedding and loss count as blocks if the script says so."""
    total = layers + sum(given.on(name) for name in _ACCOUNT)
    ends = [given.integer(name, 0) for name in _UNEVEN]
    if not any(ends):
        if total % groups:
            problem = f"{total} blocks do not divide into --pipeline-model-parallel-size {groups}"
            raise given.refused("num-layers", problem, f"a multiple of {groups}, or --pipeline-model-parallel-layout")
        return [total // groups] * groups
    if clash := next((name for name in _ACCOUNT if given.on(name)), ""):
        uneven = next(name for name in _UNEVEN if name in given)
        raise given.refused(clash, f"contradicts --{uneven} {' '.join(given.words(uneven))}", "one of the two")
    left, stages = layers - sum(ends), groups - sum(map(bool, ends))
    if left < 0 or (stages == 0) != (left == 0) or (stages and left % stages):
        name = _UNEVEN[0] if ends[0] else _UNEVEN[1]
        problem = f"leaves {left} blocks for {stages} stages of --pipeline-model-parallel-size {groups}"
        raise given.refused(name, problem, "a rest that divides")
    middle = [left // stages] * stages if stages else []
    return [*([ends[0]] if ends[0] else []), *middle, *([ends[1]] if ends[1] else [])]


def _virtual(given: Given, ranks: list[int]) -> int:
    per_stage, stages = _SPLIT
    if per_stage in given:
        each = given.integer(per_stage, 1)
        if uneven := next((name for name in _UNEVEN if name in given), ""):
            problem = f"{each} contradicts --{uneven} {' '.join(given.words(uneven))}"
            raise given.refused(per_stage, problem, "--num-virtual-stages-per-pipeline-rank beside it")
        if ranks[0] % each:
            raise given.refused(per_stage, f"{each} does not divide the {ranks[0]} blocks of a device group")
        return ranks[0] // each
    virtual = given.integer(stages, 1)
    if bad := [count for count in ranks if count % virtual]:
        raise given.refused(stages, f"{virtual} does not divide the {bad[0]} blocks of a device group")
    return virtual


def _accounted(given: Given, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the blocks if the embedding takes a block's place in the first stage, the loss in the last."""
    first, last = (int(given.on(name)) for name in _ACCOUNT)
    if len(counts) == 1:
        return (counts[0] - first - last,)
    return (counts[0] - first, *counts[1:-1], counts[-1] - last)
