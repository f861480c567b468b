"""The report of an analysis in a real browser, opened from the file system."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.traces.page.html import PART_COLOURS, page
from tests.conftest import ROOT
from tests.cost.test_page import chromium, needs_chromium, read_png

# Of ranks 0 to 7: microseconds from the start of each NCCL kernel to that of the last rank's.
WAITED = (5342, 10854, 3034, 9253, 6337, 6007, 3109, 1380)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("page") / "report.html"
    target.write_text(page(mw.analyze(ROOT / "tests/data/traces/param/dlrm_8rank", cache=False), cache=False), "utf-8")
    return target


@needs_chromium
def test_the_report_is_drawn_in_a_browser(file: Path) -> None:
    dom = chromium("--virtual-time-budget=3000", "--dump-dom", file.as_uri(), folder=file.parent)
    assert 'data-ready="yes"' in dom  # the script ran to its end
    text = re.sub(r"<[^>]+>", " ", dom.split("<script")[0])
    assert "ranks 0-7, 1 step, Tesla V100-SXM2-32GB" in text
    assert "devices idle because the host has not issued what comes next" in text
    assert "ncclKernel_AllReduce_RING_LL_Sum_float" in text
    assert text.count("rank 3") >= 1


@needs_chromium
def test_the_timeline_shows_who_waits_as_long_as_the_trace_says(file: Path) -> None:
    """Pixels of the canvas: 8 ranks wait as counted by hand in microseconds, of a window as long as the page says."""
    target = file.parent / "page.png"
    chromium("--window-size=1200,2300", f"--screenshot={target}", file.as_uri(), folder=file.parent)
    seen = sum(row.count(colour(PART_COLOURS["waiting"])) for row in read_png(target))
    data = json.loads(re.search(r'application/json">(.*?)</script>', file.read_text("utf-8"), re.DOTALL)[1])  # type: ignore[index]
    wide, tall = 1200 - 32 - 84 - 6, 19
    in_bars = sum(rank["parts"][2][1] * rank["step"] for rank in data["ranks"]) / max(r["step"] for r in data["ranks"])
    bars = 16 * 0.62 * (1200 - 32) * in_bars  # the bars of ranks have this colour as well
    waits = sum(WAITED) * 1e-6 / data["span"] * wide * tall
    assert seen == pytest.approx(waits + bars, rel=0.12)


def colour(text: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(text[1:]))
