"""The picture of what pays, in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.compression.planning.page import page, row
from tests.cost.test_page import needs_chromium
from tests.search.test_report import measured, opened

# Appended to a page: what the browser made of it, readable in the DOM, with the pointer over one cell.
MEASURE = """
<script>
window.addEventListener("load", () => {
  const cells = [...document.querySelectorAll("#grid td")];
  cells[4].dispatchEvent(new MouseEvent("mousemove", { clientX: 300, clientY: 200 }));
  document.body.dataset.measured = JSON.stringify({
    cells: cells.map((c) => [
      c.innerText.split("\\n"), getComputedStyle(c).backgroundColor, c.getBoundingClientRect().width]),
    head: [...document.querySelectorAll("#grid th")].map((c) => c.textContent),
    rows: [...document.querySelectorAll("#rows tr")].map((r) => [...r.children].map((c) => c.textContent)),
    tip: document.getElementById("tip").textContent, shown: getComputedStyle(document.getElementById("tip")).display,
    clipped: cells.some((c) => c.scrollWidth > c.clientWidth), overflow: document.body.scrollWidth > innerWidth,
  });
});
</script>
"""
WAYS = ("none", "int4", "powersgd 16")


def cell(size: int, mbit: float, way: str) -> dict[str, Any]:
    seconds, steps = 1e-4 * (1 + WAYS.index(way)), 1.1 if way == "powersgd 16" else 1.0
    plain = size / mbit / 1e5 + 1e-3
    return {
        "bytes": size, "mbit": mbit, "way": way, "topology": "gather", "piece": 1 << 20, "pieces": 2, "sent_bytes": 999,
        "seconds": seconds, "plain_seconds": plain, "steps": steps, "speed_up": plain / (seconds * steps),
    }  # fmt: skip


@pytest.fixture
def facts() -> dict[str, Any]:
    sizes, mbits = [4096, 1 << 20, 64 << 20], [10.0, 1000.0, 1e5]
    return {
        "processes": 4, "latency_seconds": 1e-4, "cores": 2.0, "sizes": sizes, "mbits": mbits, "mbit": 250.0,
        "grid": [[cell(size, mbit, WAYS[(i + j) % 3]) for j, mbit in enumerate(mbits)] for i, size in enumerate(sizes)],
        "table": [cell(size, 250.0, "int4") for size in sizes],
    }  # fmt: skip


@needs_chromium
def test_the_grid_is_drawn(facts: dict[str, Any], tmp_path: Path) -> None:
    dom, said = opened(page(facts).replace("</body>", MEASURE + "</body>"), tmp_path)
    assert said == ""
    assert 'data-ready="yes"' in dom
    drawn = measured(dom)
    cells = [one for line in facts["grid"] for one in line]
    assert [way for (_, way), _, _ in drawn["cells"]] == [one["way"] for one in cells]
    for (gain, _), _, _ in drawn["cells"]:
        assert re.fullmatch(r"\d+(\.\d)?x", gain)
    for one, ((gain, _), _, _) in zip(cells, drawn["cells"], strict=True):
        assert float(gain[:-1]) == pytest.approx(one["speed_up"], rel=0.1)
    colours = {way: {colour for (_, w), colour, _ in drawn["cells"] if w == way} for way in WAYS}
    assert all(len(some) == 1 for some in colours.values())
    assert len(set.union(*colours.values())) == len(WAYS)
    widths = [width for _, _, width in drawn["cells"]]
    assert max(widths) - min(widths) < 2
    assert drawn["head"] == ["", "10 Mbit", "1 Gbit", "100 Gbit", "4.0 KiB", "1.0 MiB", "64.0 MiB"]
    assert drawn["rows"][1:] == [row(one) for one in facts["table"]]
    assert drawn["shown"] == "block"
    assert drawn["tip"].splitlines()[0] == "1.0 MiB at 1 Gbit/s"
    assert "speed-up: " + row(cells[4])[-1] in drawn["tip"].splitlines()
    assert (drawn["clipped"], drawn["overflow"]) == (False, False)


@needs_chromium
def test_without_a_bandwidth_there_is_no_second_table(facts: dict[str, Any], tmp_path: Path) -> None:
    dom, said = opened(page(facts | {"mbit": None, "table": []}), tmp_path, "--force-dark-mode")
    assert said == ""
    assert 'id="detail" hidden' in dom


def test_the_page_needs_nothing_else(facts: dict[str, Any]) -> None:
    text = page(facts)
    assert not re.search(r"(src|href)=|https?://", text)
    assert "__DATA__" not in text


def test_names_cannot_break_out_of_the_page(facts: dict[str, Any]) -> None:
    facts["grid"][0][0]["way"] = "</script><script>alert(1)</script>"
    assert "</script><script>alert" not in page(facts)
