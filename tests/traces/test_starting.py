"""What a question about a trace loads, and what it leaves behind in the process that asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

TRACE = ROOT / "tests/data/traces/hta/a100_ddp_resnet_2rank_rank0.json.gz"
OURS = ("OPENBLAS_THREAD_TIMEOUT", "ARROW_DEFAULT_MEMORY_POOL")


def told_by(code: str, tmp_path: Path, **env: str) -> str:
    """What a process of its own prints: analyze() has been called, on a copy of a trace."""
    begin = f"import os, shutil, sys, meshwright as mw; file = shutil.copy({str(TRACE)!r}, {str(tmp_path)!r}); "
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    done = subprocess.run(
        [sys.executable, "-c", begin + code], capture_output=True, text=True, check=False, timeout=60, env=clean | env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_loaded_that_a_trace_does_not_need(tmp_path: Path) -> None:
    rooms = ("cli", "cluster", "compress", "cost", "launch", "measure", "model", "plan", "run", "search")
    others = ("msgspec", "numpy.ma", "pandas", "rich", "click", "multiprocessing")
    heavy = [*(f"meshwright.{room}" for room in rooms), *others]
    kept = "os.listdir(file + '.meshwright') != []"
    code = f"mw.analyze(file); print([name for name in {heavy!r} if name in sys.modules], {kept})"
    assert told_by(code, tmp_path) == "[] True"


def test_the_process_is_as_it_was(tmp_path: Path) -> None:
    """Its environment, and what Arrow allocates with by itself."""
    alone = "import pyarrow as pa; print(pa.default_memory_pool().backend_name)"
    usual = told_by(alone, tmp_path)
    told = told_by(f"before = dict(os.environ); mw.analyze(file); print(before == dict(os.environ)); {alone}", tmp_path)
    assert told.split() == ["True", usual]


@pytest.mark.parametrize("name", OURS)
def test_what_the_user_has_set_stays(tmp_path: Path, name: str) -> None:
    value = {"OPENBLAS_THREAD_TIMEOUT": "25", "ARROW_DEFAULT_MEMORY_POOL": "system"}[name]
    seen = told_by(f"mw.analyze(file); print(os.environ[{name!r}])", tmp_path, **{name: value})
    assert seen == value


@pytest.mark.parametrize(
    "first",
    [
        "",
        "mw.Plan; ",
        "from meshwright.plans import Plan; ",
        "import meshwright.search.planner; ",
        "mw.analyze(file); ",
    ],
)
def test_planning_is_a_function_however_it_came(tmp_path: Path, first: str) -> None:
    job = "mw.Job(mw.Model.preset('tiny-llama'), mw.Cluster.preset('1xcpu'), global_batch=4, seq_len=32, precision='fp32')"
    seen = "isinstance(found, mw.Plan), mw.plans.Plan is mw.Plan, mw.cost.RUNTIMES != ()"
    code = f"{first}found = mw.plan({job}); print({seen})"
    assert told_by(code, tmp_path) == "True True True"


def test_every_name_that_is_promised_is_there(tmp_path: Path) -> None:
    code = (
        "print([name for name in mw.__all__ if not hasattr(mw, name) or name not in dir(mw)], hasattr(mw, 'nothing'))"
    )
    assert told_by(code, tmp_path) == "[] False"
