"""The package as users get it: a wheel and a source archive, installed where nothing else is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def run(*command: str, folder: Path | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A source archive, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("package")
    listed = run("git", "ls-files", "-z", folder=ROOT).stdout.split("\0")
    for name in (name for name in listed if name.startswith(("src/", "setup", "pyproject", "README", "LICENSE"))):
        if (ROOT / name).exists():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    build = "from setuptools.build_meta import build_sdist; build_sdist('..')"
    run(sys.executable, "-c", build, folder=folder / "tree")
    (source,) = folder.glob("*.tar.gz")
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    (wheel,) = folder.glob("*.whl")
    return {"source": source, "wheel": wheel}


@pytest.fixture(scope="module")
def bare(archives: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, without extras."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    python = str(folder / "bin/python")
    run(*PIP, "--python", python, "install", "--constraint", str(ROOT / "constraints.txt"), str(archives["wheel"]))
    return folder / "bin"


def test_the_wheel_holds_compiled_c_and_no_tests(archives: dict[str, Path]) -> None:
    names = zipfile.ZipFile(archives["wheel"]).namelist()
    built = [name for name in names if re.search(r"/_(scanner|nesting|hooks)\..*\.(so|pyd)$", name)]
    assert len(built) == 3
    assert not [name for name in names if name.startswith("tests")]
    assert "meshwright/py.typed" in names
    assert "meshwright/clusters/catalogue.toml" in names


def test_the_source_archive_has_what_the_wheel_is_made_of(archives: dict[str, Path]) -> None:
    with tarfile.open(archives["source"]) as opened:
        names = opened.getnames()
    assert [name for name in names if name.endswith("scanner/event.c")]
    assert [name for name in names if name.endswith("/setup.py")]


@pytest.mark.parametrize(
    "verb", ["models tiny-llama", "plan tiny-gpt2 2xh100 --batch 4 --seq 64 --no-why", "glossary zero1", "schema"]
)
def test_planning_works_without_extras(bare: Path, verb: str, tmp_path: Path) -> None:
    run(str(bare / "meshwright"), *verb.split(), folder=tmp_path)


@pytest.mark.parametrize("verb", ["train tiny-llama --steps 1", "measure", "compress bench"])
def test_what_needs_an_extra_names_it(bare: Path, verb: str, tmp_path: Path) -> None:
    done = run(str(bare / "meshwright"), *verb.split(), folder=tmp_path, code=2)
    assert "pip install 'meshwright[run]'" in done.stderr


def test_traces_are_read_without_extras(bare: Path, tmp_path: Path) -> None:
    trace = ROOT / "tests/data/traces/hta/a100_ddp_resnet_2rank_rank0.json.gz"
    shutil.copy(trace, tmp_path)
    done = run(str(bare / "meshwright"), "analyze", ".", "--no-cache", "--json", folder=tmp_path)
    assert '"ranks"' in done.stdout


def test_readme_passes_the_strictest_type_check(bare: Path, tmp_path: Path) -> None:
    """Against the installed package, as its users check their programs."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (tmp_path / "program.py").write_text(code)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", str(bare / "python")]
    run(*mypy, "program.py", folder=tmp_path)
