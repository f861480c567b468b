"""Checks the built pages: every link inside the documentation leads to a page and a place that exist.

    python docs/check_links.py docs/_build/html

Sphinx warns of missing pages, but not of missing places in pages, nor of two pages that are written to one file.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

OWN = {"genindex", "search", "py-modindex"}  # pages that Sphinx writes itself


class Page(HTMLParser):
    """The places in a page, and where its links lead."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.places |= {value for value in (given.get("id"), given.get("name")) if value}
        if tag == "a" and given.get("href"):
            self.links.add(str(given["href"]))


def dead(folder: Path) -> list[str]:
    """Return a line for each link that leads nowhere, and for each page that Sphinx overwrites."""
    pages = {path.resolve(): Page(path) for path in folder.rglob("*.html") if "_static" not in path.parts}
    found = [
        f"{name}.md: Sphinx writes its own {name}.html" for name in OWN if (folder.parents[1] / f"{name}.md").exists()
    ]
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = unquote(parts.fragment)
            if not target.exists() or (place and target in pages and place not in pages[target].places):
                found.append(f"{path.relative_to(folder.resolve())}: {link}")
    return found


if __name__ == "__main__":
    problems = dead(Path(sys.argv[1]))
    print("".join(f"dead link: {line}\n" for line in problems), end="")
    sys.exit(1 if problems else 0)
