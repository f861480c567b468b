"""All that waits for an accelerator, the most valuable part first: builds, checks and times it in one call.

    python benchmarks/on_device.py [--only NAME,...] [--seconds 1500] [--json FILE]

Each part is a process of its own with a time limit: one that crashes or hangs costs no other. A table says what each part
printed last and how it ended; --json keeps all of it, and is written after every part. Without an accelerator the parts
that can run without one do (`everywhere`), the others are skipped by name.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Part:
    """One thing to check or time on a device."""

    name: str
    command: tuple[str, ...]  # after the interpreter
    seconds: float  # limit
    everywhere: bool = False  # it runs without an accelerator, too


@dataclass(frozen=True)
class Outcome:
    """How a part ended."""

    name: str
    code: int | None  # None: over its limit, or skipped
    seconds: float
    last: str  # line that it printed
    output: str


# Most valuable first: a lease may end before all have run. Parts are added where something new waits for a device.
PARTS: tuple[Part, ...] = (
    Part("kernels", ("-m", "pytest", "-q", "tests/gpu"), 600),
    Part("own runs", ("benchmarks/predict_own_runs.py",), 600),
)


def ran(part: Part, limit: float) -> Outcome:
    """Run a part in a process of its own, and return how it ended."""
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *part.command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", timeout=min(part.seconds, limit), check=False,
        )  # fmt: skip
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, output = None, (late.stdout or b"").decode(errors="replace") if isinstance(late.stdout, bytes) else ""
        output += f"\nended after {min(part.seconds, limit):.0f} s"
    lines = [line for line in output.splitlines() if line.strip()] or [""]
    return Outcome(part.name, code, round(time.monotonic() - begun, 1), lines[-1][:100], output)


def has_accelerator() -> bool:
    """Return True if PyTorch, asked in a process of its own, sees one."""
    asked = "import sys, torch; sys.exit(0 if torch.accelerator.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", asked], check=False, capture_output=True).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of parts, with commas")
    parser.add_argument("--seconds", type=float, default=1500.0, help="for all parts together")
    parser.add_argument("--json", help="write outcomes to this file, after every part")
    chosen = parser.parse_args()
    until, here, found = time.monotonic() + chosen.seconds, has_accelerator(), []
    print(f"{'part':20}{'seconds':>9}  {'ended':8} last line")
    for part in PARTS:
        if chosen.only and part.name not in chosen.only.split(","):
            continue
        left = until - time.monotonic()
        if left > 5 and (here or part.everywhere):
            outcome = ran(part, left)
        else:
            outcome = Outcome(
                part.name, None, 0.0, "skipped: no time is left" if here else "skipped: no accelerator", ""
            )
        found.append(outcome)
        ended = {0: "well", None: "-"}.get(outcome.code, f"with {outcome.code}")
        print(f"{outcome.name:20}{outcome.seconds:9.1f}  {ended:8} {outcome.last}", flush=True)
        if chosen.json:
            Path(chosen.json).write_text(json.dumps([asdict(each) for each in found], indent=1))
    return 1 if any(outcome.code for outcome in found) else 0


if __name__ == "__main__":
    sys.exit(main())
