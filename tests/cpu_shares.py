"""CPU-seconds of every room's tests against its share: `make test` stays short however much is added.

A plugin of pytest. Each process sums what its tests took, with the processes they started; the first one adds up, prints a
table, and fails a whole run in which a room took over a fifth more than its share of shares.toml. CPU-seconds depend little
on what else a machine does, and some on its kind: `MESHWRIGHT_SHARES=off` prints only.
"""

from __future__ import annotations

import os
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
OVER = 1.2  # times its share
_TICKS = os.sysconf("SC_CLK_TCK")
_SPENT: defaultdict[str, float] = defaultdict(float)


def shares() -> dict[str, float]:
    """Return CPU-seconds by room."""
    return {str(room): float(seconds) for room, seconds in tomllib.loads((HERE / "shares.toml").read_text()).items()}


def room_of(path: Path) -> str:
    """Return the room whose share a test takes: its folder in tests/ or src/meshwright/, else `house`.

    >>> room_of(HERE / "search/test_cuts.py"), room_of(HERE.parent / "src/meshwright/cost/page.py")
    ('search', 'cost')
    """
    for base in (HERE, HERE.parent / "src" / "meshwright"):
        if path.is_relative_to(base):
            parts = path.relative_to(base).parts
            return parts[0] if len(parts) > 1 else "house"
    return "house"


def cpu_seconds(pid: int) -> float:
    """Return the CPU-seconds of a process, of its descendants that live, and of those that ended."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    spent: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        spent[int(folder.name)] = (
            sum(map(int, fields[11:15])) / _TICKS
        )  # user and system, own and of children waited for
        children[int(fields[1])].append(int(folder.name))
    found, queue = 0.0, [pid]
    while queue:
        each = queue.pop()
        found += spent.get(each, 0.0)
        queue += children[each]
    return found


@pytest.fixture(autouse=True, scope="module")
def _counted(request: pytest.FixtureRequest) -> Iterator[None]:
    before = cpu_seconds(os.getpid())
    yield
    _SPENT[room_of(Path(str(request.path)))] += max(cpu_seconds(os.getpid()) - before, 0.0)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand a worker's sums to the process that started it, which fails a whole run of tests that took too much."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu_seconds"] = dict(_SPENT)
    elif _whole(session.config) and over_share(_SPENT, shares()) and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _whole(config: pytest.Config) -> bool:
    """Return True if no part of the tests was chosen, and the shares hold."""
    chosen = config.getoption("keyword") or config.args != config.getini("testpaths")
    return not chosen and os.environ.get("MESHWRIGHT_SHARES") != "off"


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_testnodedown(node: Any) -> None:
    for room, seconds in getattr(node, "workeroutput", {}).get("cpu_seconds", {}).items():
        _SPENT[room] += seconds


def over_share(spent: dict[str, float], share: dict[str, float]) -> list[str]:
    """Return a line for each room that took too much, or has no share.

    >>> over_share({"cost": 13.0, "attic": 1.0}, {"cost": 10.0})
    ['cost: 13 of 10 CPU-seconds', 'attic: has no share in tests/shares.toml']
    """
    lines = [f"{r}: {s:.0f} of {share[r]:.0f} CPU-seconds" for r, s in spent.items() if s > OVER * share.get(r, s)]
    return lines + [f"{room}: has no share in tests/shares.toml" for room in spent if room not in share]


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if hasattr(config, "workeroutput") or not _SPENT:
        return
    given = shares()
    terminalreporter.section("CPU-seconds by room")
    for room, seconds in sorted(_SPENT.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{room:16}{seconds:8.1f} of {given.get(room, 0):6.0f}")
    for line in over_share(_SPENT, given) if _whole(config) else ():
        terminalreporter.write_line(f"over its share: {line}", red=True)
    terminalreporter.write_line(f"{'all':16}{sum(_SPENT.values()):8.1f} of {sum(given.values()):6.0f}")


def pytest_sessionstart(session: pytest.Session) -> None:
    _SPENT.clear()
