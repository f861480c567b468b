"""The report of an analysis in a real browser, opened from the file system."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.observe.report.page import PART_COLOURS, page
from tests.conftest import ROOT
from tests.cost.test_page import chromium, needs_chromium, read_png


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
def test_the_timeline_shows_exchange_where_the_trace_has_it(file: Path) -> None:
    """Orange is drawn about as much as communication takes of the window: 8 ranks wait 37 % of 19.7 ms, less overlap."""
    target = file.parent / "page.png"
    chromium("--window-size=1200,2300", f"--screenshot={target}", file.as_uri(), folder=file.parent)
    orange = sum(row.count(colour(PART_COLOURS["transfer"])) for row in read_png(target))
    data = json.loads(re.search(r'application/json">(.*?)</script>', file.read_text("utf-8"), re.DOTALL)[1])  # type: ignore[index]
    boxes = [box for row in data["timeline"] for box in row["events"] if box[0] in ("all-reduce", "send-recv")]
    pixels = sum(end - start for _, start, end, _ in boxes) / data["span"] * (1200 - 32 - 84 - 6) * 19
    assert orange == pytest.approx(pixels, rel=0.15)


def colour(text: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(text[1:]))
