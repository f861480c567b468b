"""Decisions of a job that runs, in words and as rules of a plan; real processes."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.compression import codec
from meshwright.compression.auto import Auto, Way
from meshwright.compression.sync import Choice, Gradients, Options, Synchroniser
from meshwright.errors import InputError
from meshwright.plans import Compression
from tests.run.pool import pool

SHAPES = ((300, 200), (200,), (64, 64))
NAMES = {"a": "block.0.mlp", "b": "block.0.mlp", "c": "head"}


def told(ways: tuple[Way, ...], steps: int) -> dict[str, Any]:
    """What a synchroniser says of itself; runs in every process."""
    sync = Synchroniser(Auto(ways=ways, every=2), Options(limit=30.0))
    first = sync.explain()
    for _ in range(steps):
        for bucket, keys in enumerate(("ab", "c")):
            shapes = SHAPES[:2] if bucket == 0 else SHAPES[2:]
            whole = Gradients(tuple(keys), shapes)
            sync.submit(torch.randn(sum(whole.counts)), whole, bucket, last=bucket == 1).wait()
    dist.barrier()
    model = mw.Model.preset("tiny-llama")
    try:
        sync.rules({"a": "block.0.mlp"})
        missing = ""
    except InputError as error:
        missing = str(error)
    found = {
        "first": first,
        "last": sync.explain(),
        "rules": sync.rules(NAMES),
        "spans": [rule.layers for rule in sync.rules({**NAMES, "c": "block.1.attention"}, model)],
        "missing": missing,
        "history": len(sync.pilot.history),
    }
    dist.barrier()
    sync.close()
    return found


def test_only_one_way_is_told_by_bucket_and_as_rules() -> None:
    way = Way(Choice(codec("int8"), "scatter", 1 << 15))
    for found in pool(2).run(told, (way,), 8):
        assert found["first"] == "no step has been synchronised yet"
        assert found["history"] >= 1
        headings, first, second, *rest = found["last"].splitlines()
        assert headings.split() == ["bucket", "gradients", "numbers", "way", "parts", "sends"]
        # 60,200 numbers in pieces of 2^15, one byte each and a scale for some; each process sends a half twice.
        assert re.fullmatch(r" *0 +2 +60,200 +int8 scatter +2 +(59|6\d)\.\d KiB", first)
        assert re.fullmatch(r" *1 +1 +4,096 +int8 scatter +1 +4\.\d KiB", second)
        assert re.match(r"step \d+: int8 scatter 100% of the numbers; [\d.e-]+ s a step expected, ", rest[1])
        options = {"topology": "scatter"}
        assert found["rules"] == tuple(
            Compression(layers=name, algorithm="int8", options=options) for name in ("block.0.mlp", "head")
        )
        assert found["spans"] == ["block.0.mlp..block.1.attention"]
        assert "names: a gradient of 200 numbers has no name" in found["missing"]


def test_exact_sums_are_no_rules() -> None:
    for found in pool(2).run(told, (Way(Choice()),), 4):
        assert found["rules"] == ()
        assert "none" in found["last"]


def given() -> str:
    sync = Synchroniser(Choice(codec("int8")), Options(limit=30.0))
    try:
        sync.explain()
        return ""
    except InputError as error:
        return str(error)
    finally:
        dist.barrier()
        sync.close()


def test_a_choice_that_was_given_has_no_reasons() -> None:
    (first, _) = pool(2).run(given)
    assert first == "choice: was given, not decided (valid: meshwright.compression.auto.Auto())"
