"""Checks the subject of a commit: imperative, at most 72 characters. A hook of git; takes the message's file."""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 72


def problems(subject: str) -> list[str]:
    """Return what is wrong with a subject.

    >>> problems("Add a glossary"), problems("added a glossary.")
    ([], ['begins with a small letter', 'ends with a full stop', 'is not imperative: added'])
    """
    first = subject.split(" ", 1)[0]
    found = {
        f"has {len(subject)} characters, over {LONGEST}": len(subject) > LONGEST,
        "begins with a small letter": not re.match(r"[A-Z]", subject),
        "ends with a full stop": subject.endswith("."),
        f"is not imperative: {first}": bool(
            re.fullmatch(r"(?i)(added|fixed|changed|removed|renamed|updated|adding|fixing)", first)
        ),
    }
    return [problem for problem, wrong in found.items() if wrong]


if __name__ == "__main__":
    subject = Path(sys.argv[1]).read_text("utf-8").splitlines()[0]
    wrong = problems(subject)
    print("".join(f"subject {each}: {subject}\n" for each in wrong), end="", file=sys.stderr)
    sys.exit(1 if wrong and not subject.startswith("Merge ") else 0)
