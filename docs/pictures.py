"""Draws what the documentation shows: `python docs/pictures.py` after a change of `show` or of the glossary, and
`python docs/pictures.py compress` for what pays on this machine, `analyze` for a report (both need chromium)."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from meshwright.cli.describing.glossary import markdown
from meshwright.cli.running.training_options import table
from meshwright.cost import plan_memory
from meshwright.plans import Plan
from meshwright.plans.picture import draw

HERE = Path(__file__).parent
BEGIN, END = "<!-- options: written by `python docs/pictures.py` -->", "<!-- end of options -->"


def with_options(text: str) -> str:
    """The page about training with its table of options as they are."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + table() + END + rest.split(END)[1]


def picture_of(path: Path) -> str:
    """What `meshwright show` prints, as an SVG."""
    plan = Plan.load(path)
    console = Console(record=True, width=108, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(draw(plan, plan.resolve(), plan_memory(plan), console.width))
    return console.export_svg(title=f"meshwright show {path.name}", unique_id="plan")


def page_of(target: Path, size: str, *command: str) -> None:
    """The page that a verb writes, as far as it fits into a window."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        subprocess.run([sys.executable, "-m", "meshwright", *command, "--html", str(page)], check=True)
        flags = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        )
        shot = (f"--window-size={size}", f"--screenshot={target}", page.as_uri())
        subprocess.run(["chromium", *flags, *shot], check=True, capture_output=True)


if __name__ == "__main__" and "compress" in sys.argv[1:]:
    page_of(HERE / "images" / "compress.png", "1200,670", "compress", "explain", "--processes", "4")
elif __name__ == "__main__" and "analyze" in sys.argv[1:]:
    traces = HERE.parent / "tests/data/traces/param/dlrm_8rank"
    page_of(HERE / "images" / "analyze.png", "1200,1330", "analyze", str(traces), "--no-cache")
elif __name__ == "__main__":
    target = HERE / "images" / "plan.svg"
    target.parent.mkdir(exist_ok=True)
    target.write_text(picture_of(HERE.parent / "examples" / "llama3-70b.json"))
    (HERE / "glossary.md").write_text(markdown())
    (HERE / "train.md").write_text(with_options((HERE / "train.md").read_text()))
    print(target.name)
