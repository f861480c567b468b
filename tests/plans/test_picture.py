"""The picture: every layer and device group in its place, with and without colour."""

from __future__ import annotations

import io

from rich.console import Console

from meshwright.cost import plan_memory
from meshwright.plans import Plan
from meshwright.plans.picture import draw


def picture(table: dict[str, object], width: int = 110, colour: bool = False) -> str:
    plan = Plan.of(table)
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colour, color_system="truecolor" if colour else None)
    console.print(draw(plan, plan.resolve(), plan_memory(plan), width))
    return out.getvalue()


TINY = {"model": "tiny-llama", "cluster": "4xcpu", "global_batch": 8, "precision": "fp32"}


def test_each_stage_covers_its_layers() -> None:
    text = picture(
        {**TINY, "pp": 2, "stages": [{"layers": "embed..block.0", "recompute": "full"}, {"layers": "block.1..head"}]}
    )
    rows = [line.split() for line in text.splitlines() if line[:3] in {"0-1", "2-3"}]
    assert rows[0][1] == "AAA········"  # embed and the two layers of block 0, of 11
    assert rows[1][1] == "···BBBBBBBB"
    assert "A  dp 2, zero 1, recompute full" in text
    assert "B  dp 2, zero 1" in text


def test_memory_bars_are_to_scale() -> None:
    table = {
        "model": "llama3-8b",
        "cluster": "8xh100",
        "global_batch": 8,
        "seq_len": 8192,
        "zero": 3,
        "recompute": "full",
    }
    memory = plan_memory(Plan.of(table))[0]
    line = next(row for row in picture(table).splitlines() if "GiB of" in row)
    filled = sum(line.split()[1].count(letter) for letter in "pgoawcfx")
    assert filled == round(40 * memory.total / memory.capacity)


def test_every_part_is_seen() -> None:
    """A small model on a large device: each part that is there has its cell."""
    line = next(row for row in picture({**TINY, "cluster": "4xh100"}).splitlines() if "of 79.7 GiB" in row)
    assert line.split()[1].startswith("pgoa")


def test_what_does_not_fit_is_said() -> None:
    assert "short by" in picture({"model": "llama3-70b", "cluster": "8xh100", "global_batch": 8, "seq_len": 8192})


def test_colour_is_only_decoration() -> None:
    import re

    table = {**TINY, "pp": 2}
    assert re.sub(r"\x1b\[[0-9;]*m", "", picture(table, colour=True)) == picture(table)


def test_narrow_terminals_do_not_wrap_the_map() -> None:
    table = {"model": "llama3.1-405b", "cluster": "16x8xh100", "global_batch": 128, "seq_len": 8192, "tp": 8, "pp": 16}
    text = picture(table, width=80)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
