"""The published straggler jobs give the published figures, and the cause that was found for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.traces.job.stragglers.operation_records import RecordedJob, find_records, read_records, study

FOLDER = Path("tests/data/traces/straggler")
NEAR = 2e-6  # relative: the published analysis keeps times as 32-bit floats


def published(what: str, job: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((FOLDER / f"{what}-{job}.json").read_text())
    return told


@pytest.fixture(scope="module", params=["AR", "ST"])
def job(request: pytest.FixtureRequest) -> RecordedJob:
    return study(read_records(FOLDER / f"trace-{request.param}.parquet"))


def test_published_figures(job: RecordedJob) -> None:
    told, workers, stages = (published(what, job.name) for what in ("result", "mw", "ms"))
    assert job.steps == len(told["step_t_base"])
    assert job.measured == pytest.approx(np.mean(list(told["step_t_base"].values())), rel=NEAR)
    assert job.simulated == pytest.approx(np.mean(list(told["step_t_nodelay"].values())), rel=NEAR)
    assert job.simulated == pytest.approx(workers["tori"], rel=NEAR)
    assert job.ideal == pytest.approx(workers["tideal"], rel=NEAR)
    assert job.slowdown == pytest.approx(told["blocking_slowdown"], rel=NEAR)
    assert job.by_slowest == pytest.approx(workers["Mw"], abs=NEAR)
    assert job.by_last_stage == pytest.approx(stages["Ms"], abs=NEAR)
    for place, slowdown in enumerate(job.by_replica):
        assert slowdown == pytest.approx(told["blocking_decompose_by_dp_rank"][str(place)], rel=NEAR)
    for place, slowdown in enumerate(job.by_stage):
        assert slowdown == pytest.approx(told["blocking_decompose_by_stage"][str(place)], rel=NEAR)
    kinds = {kind: slowdown for kind, slowdown in job.by_kind if not kind.endswith(("send", "recv"))}
    expected = {kind: value for kind, value in told["blocking_decompose_by_optype"].items() if "pp-comm" not in kind}
    assert kinds == pytest.approx(expected, rel=NEAR)


def test_published_causes(job: RecordedJob) -> None:
    """One slow worker in AR, which is the first; the last of four stages in ST; nobody else."""
    if job.name == "AR":
        assert (job.cause, job.ranks, job.stage, job.slowest) == ("worker", (0,), None, (0,))
    else:
        assert (job.cause, job.ranks, job.stage) == ("stage", (6, 7), 3)


def test_folders_are_recognised(tmp_path: Path) -> None:
    assert [path.name for path in find_records(FOLDER)] == ["trace-AR.parquet", "trace-ST.parquet"]
    assert find_records(tmp_path) == ()
    pq.write_table(pa.table({"ts": [1]}), tmp_path / "trace-other.parquet")
    (tmp_path / "trace-broken.parquet").write_bytes(b"no parquet")
    assert find_records(tmp_path) == ()


SEQUENCE = ("params-all-gather", "forward-compute", "backward-compute", "gc", "layernorm-grads-all-reduce",
            "embedding-grads-all-reduce", "grads-reduce-scatter", "optimizer-clip-main-grad", "optimizer")  # fmt: skip
TOGETHER = ("params-all-gather", "grads-reduce-scatter", "optimizer-clip-main-grad")


def rows(took: np.ndarray) -> list[dict[str, Any]]:
    """Replicas without a pipeline: [replica, step, operation] one after the other, some of them together."""
    made: list[dict[str, Any]] = []
    for step in range(took.shape[1]):
        now = np.zeros(len(took))
        for place, kind in enumerate(SEQUENCE):
            start = now.copy()
            now = (np.full(len(took), now.max()) if kind in TOGETHER else now) + took[:, step, place]
            same = {"stage": 0, "step": step + 10, "optype": kind, "seq_id": 0}
            made += [
                same | {"dp_rank": replica, "rank": replica * 8, "start_ts": begun, "duration": ended - begun}
                for replica, (begun, ended) in enumerate(zip(start.tolist(), now.tolist(), strict=True))
            ]
    return made


def studied(folder: Path, made: list[dict[str, Any]]) -> RecordedJob:
    pq.write_table(pa.Table.from_pylist(made), folder / "trace-made.parquet")
    return study(read_records(folder / "trace-made.parquet"))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.integers(3, 8), st.one_of(st.none(), st.integers(0, 7)))
def test_a_slow_replica_is_named_and_nobody_where_all_are_alike(
    tmp_path_factory: pytest.TempPathFactory, seed: int, replicas: int, which: int | None
) -> None:
    took = 0.1 * (1 + 0.01 * np.random.default_rng(seed).random((replicas, 6, len(SEQUENCE))))
    if which is not None:
        took[which % replicas, :, 1:3] *= 1.6
    job = studied(tmp_path_factory.mktemp("made"), rows(took))
    assert job.measured == pytest.approx(job.simulated)  # nothing was late
    if which is None:
        assert (job.cause, job.ranks) == ("", ())
    else:
        assert (job.cause, job.ranks) == ("worker", (which % replicas * 8,))
        assert job.by_slowest > 0.9


def test_steps_that_are_not_whole(tmp_path: Path) -> None:
    made = rows(np.full((3, 4, len(SEQUENCE)), 0.1))
    job = studied(tmp_path, [row for row in made if (row["step"], row["rank"], row["optype"]) != (11, 8, "gc")])
    assert job.steps == 3
    assert [str(note) for note in job.notes] == ["left out: steps in which operations are missing"]


def test_bad_records(tmp_path: Path) -> None:
    made = rows(np.full((2, 2, len(SEQUENCE)), 0.1))
    with pytest.raises(InputError, match="no such file"):
        read_records(tmp_path / "trace-none.parquet")
    with pytest.raises(InputError, match=r"duration: is not there \(valid: columns dp_rank"):
        studied(tmp_path, [{key: value for key, value in row.items() if key != "duration"} for row in made])
    with pytest.raises(InputError, match=r"trace-made.parquet: optype: unknown kind of operation 'dance'"):
        studied(tmp_path, [row | {"optype": "dance" if row["optype"] == "gc" else row["optype"]} for row in made])
    with pytest.raises(InputError, match="no step has every operation"):
        studied(tmp_path, [row for place, row in enumerate(made) if place not in (3, 30)])
    with pytest.raises(InputError, match=r"optype: has no forward-compute"):
        studied(tmp_path, [row for row in made if row["optype"] != "forward-compute"])
    sent = [row | {"optype": "forward-send"} for row in made if row["optype"] == "gc"]
    with pytest.raises(InputError, match="forward-recv 0 of stage 1 is missing"):
        studied(tmp_path, made + sent)
