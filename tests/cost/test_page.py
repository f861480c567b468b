"""The page of an estimate in a real browser, opened from the file system."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

import meshwright as mw
from meshwright.cost.estimate import Estimate, estimate
from meshwright.cost.page import page

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed and could not be")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")


@pytest.fixture(scope="module")
def found() -> Estimate:
    job = mw.Job(mw.Model.preset("llama3-70b"), mw.Cluster.preset("8x8xh100"), global_batch=64, seq_len=4096)
    return estimate(job, mw.Plan.of({"tp": 8, "pp": 4, "virtual": 2}, job), "nemo")


@pytest.fixture(scope="module")
def file(found: Estimate, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("page") / "estimate.html"
    target.write_text(page(found), encoding="utf-8")
    return target


def chromium(*arguments: str, folder: Path) -> str:
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@needs_chromium
def test_the_page_is_drawn_in_a_browser(file: Path, found: Estimate) -> None:
    dom = chromium("--virtual-time-budget=3000", "--dump-dom", file.as_uri(), folder=file.parent)
    assert 'data-ready="yes"' in dom  # the script ran to its end
    assert "llama3-70b on 8x8xh100" in dom
    text = re.sub(r"<[^>]+>", " ", dom.split("<script")[0])
    assert f"{found.mfu:.1%}" in text
    assert "pipeline bubble" in text
    assert text.count("GiB of 79.7 GiB") >= 4  # a memory bar for each device group


@needs_chromium
def test_the_timeline_has_forwards_backwards_and_bubbles(file: Path) -> None:
    """Pixels of the canvas: blue forwards, orange backwards, and in the first rows nothing at the start of group 3."""
    target = file.parent / "page.png"
    chromium("--window-size=1200,1400", f"--screenshot={target}", file.as_uri(), folder=file.parent)
    pixels = read_png(target)
    counts = {name: sum(row.count(colour) for row in pixels) for name, colour in COLOURS.items()}
    assert counts["forward"] > 5000
    assert counts["backward"] > 1.5 * counts["forward"]  # it takes about twice as long
    assert counts["optimizer memory"] > 500


COLOURS = {"forward": (0x3B, 0x6E, 0xA8), "backward": (0xC4, 0x62, 0x2D), "optimizer memory": (0x3A, 0x7D, 0x44)}


def read_png(path: Path) -> list[list[tuple[int, int, int]]]:
    """Rows of 8-bit pixels; enough of the PNG specification (ISO/IEC 15948) for a browser's screenshots."""
    content, at, data, header = path.read_bytes(), 8, b"", b""
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        kind, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        header, data = (body if kind == b"IHDR" else header), (data + body if kind == b"IDAT" else data)
        at += 12 + length
    width, height, _, colour = struct.unpack(">IIBB", header[:10])
    size = {2: 3, 6: 4}[colour]
    raw, rows, before = zlib.decompress(data), [], bytearray(width * size)
    for y in range(height):
        start = y * (width * size + 1)
        line = _unfilter(raw[start], bytearray(raw[start + 1 : start + 1 + width * size]), before, size)
        rows.append([(line[x], line[x + 1], line[x + 2]) for x in range(0, width * size, size)])
        before = line
    return rows


def _unfilter(kind: int, line: bytearray, above: bytearray, size: int) -> bytearray:
    for i in range(len(line)):
        a, b, c = (line[i - size] if i >= size else 0), above[i], (above[i - size] if i >= size else 0)
        guess = a + b - c
        paeth = min((a, b, c), key=lambda value: abs(guess - value))
        line[i] = (line[i] + (0, a, b, (a + b) // 2, paeth)[kind]) & 255
    return line


def test_names_cannot_break_out_of_the_page(found: Estimate) -> None:
    from dataclasses import replace

    odd = replace(found.job.model, name="</script><script>alert(1)</script>")
    text = page(replace(found, job=replace(found.job, model=odd)))
    assert "</script><script>alert" not in text


def test_the_page_needs_nothing_else(file: Path) -> None:
    assert not re.search(r"(src|href)=|https?://", file.read_text())
