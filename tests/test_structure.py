"""The promises of the architecture: order of the rooms, no torch while planning, fast start, live links."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

PLANNING = [
    ["models"],
    ["models", "llama3-70b", "--json"],
    ["clusters"],
    ["clusters", "8x8xh100", "--json"],
    ["cluster", "detect"],
    ["check", str(ROOT / "examples/llama3-70b.json")],
    ["show", str(ROOT / "examples/llama3-70b.json")],
    ["estimate", str(ROOT / "examples/llama3-70b.json")],
    ["launch", str(ROOT / "examples/llama3-70b.json"), "--on", "slurm", "--steps", "5", "--dry-run"],
    ["export", str(ROOT / "examples/llama3-70b.json"), "--to", "megatron"],
    ["schema"],
    ["--help"],
]
# Prices an interleaved pipeline of 5,120 actions, which takes longer than starting.
IMPORT = ["import", str(ROOT / "examples/megatron_llama3_70b.sh"), "--from", "megatron", "--cluster", "8x8xh100"]


@pytest.mark.parametrize("verb", [*PLANNING, IMPORT], ids=lambda verb: " ".join(Path(word).name for word in verb))
def test_planning_verbs_never_import_torch(verb: list[str], tmp_path: Path) -> None:
    """A torch that fails on import stands first on the path; transformers too, and numpy where nothing is priced."""
    priced = {"estimate", "check", "show", "launch", "export", "import"} & set(verb)
    for name in ("torch", "transformers", *(() if priced else ("numpy",))):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')\n")
    setup = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['meshwright', *{verb!r}]"
    code = f"{setup}; from meshwright.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def cpu_seconds(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(
    "verb", [None, *PLANNING], ids=lambda verb: " ".join(Path(w).name for w in verb) if verb else "import"
)
def test_starts_in_under_0_4_seconds_of_cpu(verb: list[str] | None) -> None:
    command = [sys.executable, "-c", "import meshwright"]
    if verb is not None:
        command = [sys.executable, "-c", "from meshwright.cli import main; main()", *verb]
    assert any(cpu_seconds(command) < 0.4 for _ in range(8))  # what else runs on a machine only adds to it


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=folder, capture_output=True, text=True, check=False
    )


def copy_of_the_source(folder: Path) -> Path:
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_rooms_import_only_what_they_may() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("models/layer.py", "from meshwright.plans import Plan"),
        ("clusters/device.py", "import meshwright.cost"),
        ("plans/job.py", "from meshwright.cost.memory.device_memory import plan_memory"),
        ("cost/memory/device_memory.py", "import meshwright.cli"),
        ("errors.py", "import meshwright.base.files"),
        ("plans/job.py", "import torch"),
        ("attic/__init__.py", "VALUE = 1"),  # a room nobody has placed in the order
    ],
)
def test_a_room_that_imports_one_below_it_is_caught(tmp_path: Path, file: str, line: str) -> None:
    folder = copy_of_the_source(tmp_path)
    path = folder / "src/meshwright" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + f"\n{line}\n")
    assert lint_imports(folder).returncode == 1


OURS = r"^https://(github\.com/meshwright/meshwright/blob|raw\.githubusercontent\.com/meshwright/meshwright)/main/"
PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    """Relative links and their anchors, in the README too, which the documentation tool does not see."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for link in re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", text):
        target = re.sub(OURS, "", link)  # the README is shown by package indexes too, which know no files
        assert page.name != "README.md" or target != link
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page.name}: {target}"


def test_a_dead_link_fails_the_documentation_build(tmp_path: Path) -> None:
    (tmp_path / "docs/schema").mkdir(parents=True)
    shutil.copy(ROOT / "docs/conf.py", tmp_path / "docs")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "docs", "out"]
    for page, code in [("index", 0), ("no-such-page", 1)]:
        (tmp_path / "docs/index.md").write_text(f"# A page\n\n[somewhere]({page}.md)\n")
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, page in done.stderr) == (code, bool(code)), done.stderr


def test_every_dependency_is_justified() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] + [d for extra in project["optional-dependencies"].values() for d in extra]
    page = (ROOT / "docs/dependencies.md").read_text()
    names = {re.split(r"[\[<>=]", d)[0] for d in listed} - {"meshwright"}
    assert {name for name in names if f"`{name}`" not in page} == set()
    pinned = {
        line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert {name.lower() for name in names} - pinned == set()


def test_every_room_has_a_page() -> None:
    """In the table of rooms, which links to it; `base` is no room."""
    rooms = {path.parent.name for path in (ROOT / "src/meshwright").glob("*/__init__.py")} - {"base"}
    rows = re.findall(r"^\| \[`(\w+)/`\]\((\w+)\.md\)", (ROOT / "docs/architecture.md").read_text(), re.M)
    assert {room for room, page in rows if (ROOT / "docs" / f"{page}.md").exists()} == rooms


def test_no_path_of_a_machine_is_committed() -> None:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("git, or a git checkout, is missing: what is committed cannot be listed")
    pattern = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+|opt/\w+)/")
    here = Path(__file__).name
    for name in done.stdout.split("\0"):
        path = ROOT / name
        if (
            name
            and path.is_file()
            and path.suffix in {".py", ".md", ".toml", ".json", ".txt", ""}
            and path.name != here
        ):
            assert not pattern.search(path.read_text("utf-8", "replace")), name


def test_the_picture_in_the_readme_is_what_show_draws() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    from pictures import picture_of

    assert (ROOT / "docs/images/plan.svg").read_text() == picture_of(ROOT / "examples/llama3-70b.json")


def test_pages_that_are_made_from_the_code_are_up_to_date() -> None:
    """`python docs/pictures.py` writes them."""
    sys.path.insert(0, str(ROOT / "docs"))
    from pictures import with_options

    from meshwright.cli.describing.glossary import markdown, terms

    page = (ROOT / "docs/train.md").read_text()
    assert page == with_options(page)
    assert (ROOT / "docs/glossary.md").read_text() == markdown()
    assert {term.file for term in terms() if not (ROOT / "src/meshwright" / term.file).exists()} == set()


def test_json_presets_and_examples_are_plain_json() -> None:
    for path in [*(ROOT / "src").rglob("*.json"), *(ROOT / "examples").glob("*.json")]:
        json.loads(path.read_text())


def plans_in_the_documentation() -> list[tuple[str, str]]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    blocks = [(page.name, text) for page in pages for text in re.findall(r"```json\n(.*?)```", page.read_text(), re.S)]
    return [(name, text) for name, text in blocks if '"model"' in text]


@pytest.mark.parametrize(("page", "text"), plans_in_the_documentation())
def test_plans_in_the_documentation_are_valid(page: str, text: str) -> None:
    from meshwright.plans import Plan

    assert Plan.parse(text).devices > 0


def test_python_in_the_readme_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len([line for line in code.splitlines() if line.strip()]) == 5
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(example: Path) -> None:
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "devices" in done.stdout


def test_every_rule_and_verb_is_documented() -> None:
    from meshwright.cli import VERBS
    from meshwright.plans import RULES, rule_name

    rules, verbs = (ROOT / "docs/plans.md").read_text(), (ROOT / "docs/cli.md").read_text()
    assert {name for name in map(rule_name, RULES) if f"| `{name}` |" not in rules} == set()
    assert {verb for verb in VERBS if f"`meshwright {verb}" not in verbs} == set()
