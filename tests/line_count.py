"""Prints the size of each room, for `make lint`; tests/test_house.py says how long a file may be."""

from __future__ import annotations

from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "meshwright"


def main() -> None:
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


if __name__ == "__main__":
    main()
