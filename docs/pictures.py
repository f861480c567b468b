"""Draws the pictures of the documentation: `python docs/pictures.py` after a change of `show`."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from meshwright.cost import plan_memory
from meshwright.plan import Plan
from meshwright.plan.picture import draw

HERE = Path(__file__).parent


def picture_of(path: Path) -> str:
    """What `meshwright show` prints, as an SVG."""
    plan = Plan.load(path)
    console = Console(record=True, width=108, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(draw(plan, plan.resolve(), plan_memory(plan), console.width))
    return console.export_svg(title=f"meshwright show {path.name}", unique_id="plan")


if __name__ == "__main__":
    target = HERE / "images" / "plan.svg"
    target.parent.mkdir(exist_ok=True)
    target.write_text(picture_of(HERE.parent / "examples" / "llama3-70b.json"))
    print(target.name)
