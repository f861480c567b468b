"""The report of a plan in a real browser: drawn to the end, to scale, with nothing in the console."""

from __future__ import annotations

import html
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.plans.spans import layer_range
from meshwright.plans.stored_estimate import MEMORY_PARTS
from meshwright.search.explanation.explain import Explanation, RunnerUp, explain, runners_up
from meshwright.search.explanation.features import spans_of
from meshwright.search.explanation.html import report, sweep_page
from meshwright.search.explanation.sweep import sweep
from meshwright.search.planner import Answer, plan
from tests.cost.test_page import CHROMIUM, FLAGS, needs_chromium

# Appended to a page: what the browser made of it, readable in the DOM.
MEASURE = """
<script>
window.addEventListener("load", () => {
  const wide = (e) => e.getBoundingClientRect().width;
  const bars = (id) => [...document.querySelectorAll(`#${id} .bar div`)].map(
    (bar) => [...bar.children].map((part) => wide(part) / wide(bar)));
  document.body.dataset.measured = JSON.stringify({
    cells: [...document.querySelectorAll(".map .cell")].map((c) => wide(c) / wide(c.parentElement)),
    time: bars("time"), memory: bars("memory"), helps: bars("helps"),
    points: document.querySelectorAll(".scatter .point").length, overflow: document.body.scrollWidth > innerWidth,
  });
});
</script>
"""
Found = tuple[Answer, Explanation, tuple[RunnerUp, ...]]


@pytest.fixture(scope="module")
def found() -> Found:
    job = mw.Job(mw.Model.preset("llama3-8b"), mw.Cluster.preset("8xh100"), global_batch=64, seq_len=8192)
    answer = plan(job)
    return answer, explain(job, answer.plan), runners_up(answer)


def opened(text: str, folder: Path, *flags: str) -> tuple[str, str]:
    """(the page as the browser has it, what it said on its console)."""
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    command = [
        CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--window-size=1200,900",
        "--virtual-time-budget=3000", *flags, "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def measured(dom: str) -> dict[str, Any]:
    (text,) = re.findall(r'data-measured="([^"]*)"', dom)
    numbers: dict[str, Any] = json.loads(html.unescape(text))
    return numbers


@needs_chromium
def test_the_report_is_drawn_to_scale(found: Found, tmp_path: Path) -> None:
    answer, explanation, runners = found
    text = report(answer, explanation, runners, "proven optimal: bound equals value", ["a note"])
    dom, said = opened(text.replace("</body>", MEASURE + "</body>"), tmp_path)
    assert said == ""
    assert 'data-ready="yes"' in dom
    assert 'data-report="yes"' in dom
    shown = html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<script.*?</script>", "", dom, flags=re.S)))
    for words in (explanation.limit.text, runners[0].loses, "proven optimal", "a note", explanation.helps[0].change):
        assert words in shown

    drawn, model = measured(dom), answer.estimate.job.model
    layers = [len(layer_range(model, span.layers)) / len(model.layers) for span in spans_of(answer.plan)]
    assert sorted(drawn["cells"]) == pytest.approx(sorted(layers), abs=0.003)
    assert sum(drawn["cells"]) == pytest.approx(1.0, abs=0.01)
    seconds = sorted(answer.estimate.breakdown.values(), reverse=True)
    assert [row[0] for row in drawn["time"]] == pytest.approx([s / seconds[0] for s in seconds], abs=0.003)
    for row, bars in zip(answer.estimate.memory, drawn["memory"], strict=True):
        parts = [getattr(row, name) / row.capacity for name, _, _ in MEMORY_PARTS]
        assert bars == pytest.approx(parts, abs=0.003)
    gains = [h.gain for h in explanation.helps]
    assert [row[0] for row in drawn["helps"]] == pytest.approx([g / max(gains) for g in gains], abs=0.003)
    known = {p.pipelines for p in (answer.plan, *answer.others, *(r.plan for r in runners))}
    assert drawn["points"] == len(known)
    assert drawn["overflow"] is False


@needs_chromium
def test_a_stopped_search_has_a_report_too(found: Found, tmp_path: Path) -> None:
    dom, said = opened(report(found[0], None, (), "gap 3 %: interrupted"), tmp_path, "--force-dark-mode")
    assert said == ""
    assert 'data-report="yes"' in dom
    assert 'class="why" hidden' in dom


@needs_chromium
def test_a_sweep_is_drawn(tmp_path: Path) -> None:
    points = sweep(mw.Model.preset("gpt2-xl"), mw.Cluster.preset("8xa100-80gb"), [32, 64], [1024])
    dom, said = opened(sweep_page(points, 2.0).replace("</body>", MEASURE + "</body>"), tmp_path)
    assert said == ""
    assert measured(dom)["points"] == 2
    assert "dollars per billion tokens" in dom


def test_the_report_needs_nothing_else(found: Found) -> None:
    text = report(*found, "proven")
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "__DATA__" not in text
    assert "__SCATTER__" not in text


def test_names_cannot_break_out_of_the_report(found: Found) -> None:
    answer = found[0]
    odd = replace(answer.estimate.job.model, name="</script><script>alert(1)</script>")
    estimate = replace(answer.estimate, job=replace(answer.estimate.job, model=odd))
    text = report(replace(answer, estimate=estimate, others=()), None, (), "</script><script>alert(2)</script>")
    assert "</script><script>alert" not in text
