"""Prints the size of each room, and fails when a file outgrows one idea. Run by `make lint`."""

from __future__ import annotations

import sys
from pathlib import Path

LONGEST = 450  # lines; a file above this needs splitting
SOURCE = Path(__file__).resolve().parents[1] / "src" / "meshwright"


def main() -> int:
    sizes = {path: len(path.read_text("utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    rooms: dict[str, int] = {}
    for path, lines in sizes.items():
        inside = path.relative_to(SOURCE).parts
        rooms[inside[0] if len(inside) > 1 else "."] = rooms.get(inside[0] if len(inside) > 1 else ".", 0) + lines
    print(
        "lines: "
        + ", ".join(f"{room} {lines}" for room, lines in sorted(rooms.items()))
        + f"; in all {sum(sizes.values())}"
    )
    long = {str(path.relative_to(SOURCE)): lines for path, lines in sizes.items() if lines > LONGEST}
    for name, lines in long.items():
        print(f"{name} has {lines} lines, over {LONGEST}: does it still hold one idea?")
    return 1 if long else 0


if __name__ == "__main__":
    sys.exit(main())
