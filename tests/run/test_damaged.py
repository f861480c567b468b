"""Checkpoints that are broken in many ways: each is named, none is taken for whole, none ends in a traceback."""

from __future__ import annotations

import json
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

import meshwright as mw
from meshwright.errors import InputError
from meshwright.run.folder.checkpoint.checkpoint import Checkpoints, damage, latest
from meshwright.run.optimizers.choose import optimizer_for
from meshwright.run.parallel.apply import apply
from tests.run.families import CONFIGS
from tests.run.parity import GROUPS, plan_of
from tests.run.pool import pool
from tests.run.test_train import steps_of

Table = dict[str, Any]


def plan() -> mw.Plan:
    job = mw.Job(mw.Model.from_config(CONFIGS["llama"]), mw.Cluster.preset("1xcpu"), 2, seq_len=16, precision="fp32")
    return mw.Plan.of({"micro_batches": 1}, job)


def train(folder: Path, steps: int, **options: Any) -> list[Table]:
    return mw.train(plan(), steps=steps, save_every=1, output=str(folder), decay="constant", **options)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with whole checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("good") / "run"
    train(folder, 2)
    return folder


@pytest.fixture
def run(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "run"))


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def flipped(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 4
    path.write_bytes(bytes(content))


def replaced_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def resealed(path: Path, change: Callable[[Table], object]) -> None:
    """Another manifest whose own sum is right: by hand, as its format says."""
    table = json.loads((path / "manifest.json").read_text())
    del table["crc32"]
    change(table)
    table["crc32"] = zlib.crc32(json.dumps(table, sort_keys=True).encode())
    (path / "manifest.json").write_text(json.dumps(table))


def fitted(path: Path, name: str, content: bytes) -> None:
    """A file of another content, with size and sum made to fit."""
    (path / name).write_bytes(content)
    facts = {"bytes": len(content), "crc32": zlib.crc32(content)}
    resealed(path, lambda table: table["parts"][0]["files"].update({name: facts}))


def renamed_shard(path: Path) -> None:
    (path / "__0_0.distcp").rename(path / "other")
    resealed(
        path, lambda table: table["parts"][0]["files"].update(other=table["parts"][0]["files"].pop("__0_0.distcp"))
    )


def written(path: Path, text: str) -> None:
    (path / "manifest.json").write_text(text)


WAYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard cut": (lambda p: cut(p / "__0_0.distcp", 1000), "__0_0.distcp has 1000 bytes of"),
    "shard empty": (lambda p: cut(p / "__0_0.distcp", 0), "__0_0.distcp has 0 bytes"),
    "shard flipped": (lambda p: flipped(p / "__0_0.distcp", 0.5), "__0_0.distcp is not what was written"),
    "shard longer": (lambda p: (p / "__0_0.distcp").open("ab").write(b"x"), "__0_0.distcp has"),
    "shard missing": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "shard a folder": (lambda p: replaced_by_folder(p / "__0_0.distcp"), "__0_0.distcp is no file"),
    "index missing": (lambda p: (p / ".metadata").unlink(), ".metadata is missing"),
    "index flipped": (lambda p: flipped(p / ".metadata", 0.3), ".metadata is not what was written"),
    "index a folder": (lambda p: replaced_by_folder(p / ".metadata"), ".metadata is no file"),
    "index no pickle, sums fit": (lambda p: fitted(p, ".metadata", b"nothing"), ".metadata cannot be read"),
    "index cut, sums fit": (
        lambda p: fitted(p, ".metadata", (p / ".metadata").read_bytes()[:99]), ".metadata cannot be read",
    ),
    "index another object, sums fit": (
        lambda p: fitted(p, ".metadata", pickle.dumps([1, 2])), ".metadata cannot be read: AttributeError",
    ),
    "shard under another name": (renamed_shard, "__0_0.distcp is needed, but is in no part"),
    "manifest missing": (lambda p: (p / "manifest.json").unlink(), "no such file"),
    "manifest empty": (lambda p: written(p, ""), "is empty"),
    "manifest cut": (lambda p: cut(p / "manifest.json", 300), "malformed JSON"),
    "manifest bytes": (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe\x00"), "is not UTF-8"),
    "manifest a folder": (lambda p: replaced_by_folder(p / "manifest.json"), "is a folder"),
    "manifest a list": (lambda p: written(p, "[]"), "is not a checkpoint's"),
    "manifest of digits": (lambda p: written(p, "9" * 5000), "malformed JSON"),
    "manifest nested": (lambda p: written(p, "[" * 100000), "malformed JSON"),
    "manifest changed": (
        lambda p: written(p, (p / "manifest.json").read_text().replace('"updates": 2', '"updates": 3')),
        "manifest.json is not what was written",
    ),
    "version 1": (
        lambda p: written(p, '{"format": "meshwright-checkpoint", "version": 1}'),
        "is of version 1, this program reads 2",
    ),
    "no parts": (lambda p: resealed(p, lambda t: t.pop("parts")), "manifest.json: parts: is required"),
    "parts a number": (lambda p: resealed(p, lambda t: t.update(parts=3)), "manifest.json: parts: expected"),
    "files a list": (lambda p: resealed(p, lambda t: t["parts"][0].update(files=[])), "expected an object"),
    "bytes a word": (
        lambda p: resealed(p, lambda t: t["parts"][0]["files"][".metadata"].update(bytes="many")), "an integer",
    ),
    "facts a list": (lambda p: resealed(p, lambda t: t.update(facts=[])), "facts: expected an object"),
    "another step": (lambda p: resealed(p, lambda t: t.update(step=7)), "is of step 7"),
    "a rank is missing": (lambda p: resealed(p, lambda t: t.update(ranks=2)), "is of 2 ranks, but has the parts of 0"),
    "a rank twice": (lambda p: resealed(p, lambda t: t["parts"].append(t["parts"][0])), "is of 1 ranks"),
    "no rank": (lambda p: resealed(p, lambda t: t.update(parts=[], ranks=0)), ".metadata is needed"),
    "a part of another run": (
        lambda p: resealed(p, lambda t: t["parts"][0].update(run="beef")), "the part of rank 0 is of run beef, not",
    ),
    "an empty part": (lambda p: resealed(p, lambda t: t["parts"][0].update(files={})), "the part of rank 0 is empty"),
    "a name that leaves the folder": (
        lambda p: resealed(p, lambda t: t["parts"][0]["files"].update({"../../plan.json": {"bytes": 1, "crc32": 1}})),
        "which is no file of this folder",
    ),
    "a name of the whole tree": (
        lambda p: resealed(p, lambda t: t["parts"][0]["files"].update({"/etc/passwd": {"bytes": 1, "crc32": 1}})),
        "which is no file of this folder",
    ),
    "a name that no file has": (
        lambda p: resealed(p, lambda t: t["parts"][0]["files"].update({"a\0b": {"bytes": 1, "crc32": 1}})), "missing",
    ),
    "a file in its place": (lambda p: (shutil.rmtree(p), p.write_text("x")), "cannot be read: Not a directory"),
    "an empty folder": (lambda p: (shutil.rmtree(p), p.mkdir()), "no such file"),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_the_one_before_is_taken(way: str, run: Path) -> None:
    newest = run / "checkpoints/step-00000002"
    assert damage(newest) == ""
    change, said = WAYS[way]
    change(newest)
    assert said in damage(newest)
    found, problems = latest(run / "checkpoints")
    assert found is not None
    assert found.step == 1
    assert problems == [f"step-00000002: {damage(newest)}"]


@pytest.mark.parametrize("way", ["a file in its place", "shard cut", "parts a number"])
def test_a_run_goes_on_from_the_one_before(way: str, run: Path) -> None:
    WAYS[way][0](run / "checkpoints/step-00000002")
    events = train(run, 3, resume=True)
    assert next(event["problem"] for event in events if event["event"] == "damaged").startswith("step-00000002: ")
    assert [event["step"] for event in steps_of(events)] == [2, 3]
    found, problems = latest(run / "checkpoints")
    assert found is not None
    assert (found.step, problems, damage(run / "checkpoints/step-00000002")) == (3, [], "")


def test_all_damaged_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    WAYS["shard cut"][0](run / "checkpoints/step-00000002")
    WAYS["a file in its place"][0](run / "checkpoints/step-00000001")
    wrong = r"holds no whole checkpoint; step-00000002: __0_0.distcp has .*; step-00000001: cannot be read"
    with pytest.raises(InputError, match=rf"--resume: {wrong}"):
        train(run, 3, resume=True)
    events = train(run, 3, auto_resume=True)
    assert [event["step"] for event in steps_of(events)] == [1, 2, 3]
    assert [event["step"] for event in events if event["event"] == "anew"] == [0]
    err = capsys.readouterr().err
    assert err.count("the run begins at step 1") == 1
    assert "step-00000002: __0_0.distcp has" in err
    assert "anew" in (run / "events.jsonl").read_text()


def test_contents_that_do_not_fit_their_sums_are_named(run: Path) -> None:
    """Sums that were made to fit: only reading it shows that it is broken."""
    newest = run / "checkpoints/step-00000002"
    content = bytearray((newest / "__0_0.distcp").read_bytes())
    fitted(newest, "__0_0.distcp", bytes(len(content)))
    assert damage(newest) == ""
    with pytest.raises(InputError, match=r"step-00000002: --resume: cannot be read: .*valid: the one before"):
        train(run, 3, resume=True)


def saved(folder: str) -> None:
    """A checkpoint of two ranks."""
    model, plan = plan_of("dp=2,zero=3", CONFIGS["llama"])
    part = apply(model, plan, seed=7, groups=GROUPS)
    checkpoints = Checkpoints(folder)
    checkpoints.save(4, part, optimizer_for("adamw", part, 1e-3, 0.1), {"note": (1, 2.5)})
    checkpoints.wait()


def test_sums_are_of_what_every_rank_wrote(tmp_path: Path) -> None:
    pool(2).run(saved, str(tmp_path))
    path = tmp_path / "step-00000004"
    assert damage(path) == ""
    table = json.loads((path / "manifest.json").read_text())
    assert (table["step"], table["ranks"], table["facts"]) == (4, 2, {"note": [1, 2.5]})
    assert [set(part["files"]) for part in table["parts"]] == [{"__0_0.distcp", ".metadata"}, {"__1_0.distcp"}]
    for part in table["parts"]:
        for name, facts in part["files"].items():
            content = (path / name).read_bytes()
            assert facts == {"bytes": len(content), "crc32": zlib.crc32(content)}
    needed = FileSystemReader(path).read_metadata().storage_data.values()
    assert {place.relative_path for place in needed} == {"__0_0.distcp", "__1_0.distcp"}
    resealed(path, lambda table: table["parts"].pop())
    assert damage(path) == "is of 2 ranks, but has the parts of 0"


def refused(folder: str) -> list[str]:
    """What both ranks are told when the second one cannot write."""
    model, plan = plan_of("dp=2,zero=3", CONFIGS["llama"])
    part = apply(model, plan, seed=7, groups=GROUPS)
    checkpoints = Checkpoints(folder)
    if torch.distributed.get_rank() == 1:
        from meshwright.run.folder.checkpoint import files

        class Full:
            def __init__(self, raw: Any) -> None:
                self._raw = raw

            def write(self, data: Any) -> int:
                raise OSError(28, "No space left on device")

        counted = files._Counted
        files._Counted = lambda raw: counted(Full(raw))  # type: ignore[assignment,misc]
    checkpoints.save(4, part, optimizer_for("adamw", part, 1e-3, 0.1), {})
    try:
        checkpoints.wait()
    except Exception as error:
        return [type(error).__name__, str(error)]
    finally:
        if torch.distributed.get_rank() == 1:
            files._Counted = counted  # type: ignore[misc]
    return []


def test_every_rank_is_told_whose_disk_is_full(tmp_path: Path) -> None:
    told = pool(2).run(refused, str(tmp_path))
    assert told[0] == told[1]
    assert told[0][0] == "TrainingFailed"
    assert told[0][1].endswith("__1_0.distcp: the disk is full; the last whole checkpoint is kept")
    assert list(tmp_path.iterdir()) == []
