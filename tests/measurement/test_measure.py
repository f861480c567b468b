"""Measuring a whole machine with small shapes: what is written, interruption, noise, and what is said of mistakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import distributed as dist

import meshwright as mw
from meshwright.cost.constants import DEFAULT
from meshwright.errors import InputError
from meshwright.measurement import layers as timed_layers
from meshwright.measurement import profile, samples, worker
from meshwright.measurement.layers import beside_kernels
from meshwright.measurement.measure import layers, measure
from meshwright.measurement.profile import noise
from meshwright.measurement.samples import Sample, Scale
from meshwright.measurement.timing import Timing, timed
from tests.run.pool import pool

LINK = {"kind": "memory", "topology": "all-to-all", "bandwidth_gb_s": 1.0, "latency_us": 1.0}
AT_ONCE = {f"{kind}_gb_s": 1.0 for kind in ("reduce", "gather", "exchange", "send")} | {"step_us": 0, "start_us": 0}
SMALL = Scale(
    (16, 64), (16, 32, 64), (16, 32), ((2, 16),), 2**12, 2**12, vocabulary=((16, 16, 64),), blocks=((128, 16),)
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that take seconds; noise of a busy machine is none of these tests' business."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(profile, "PROCESSOR", SMALL)
    monkeypatch.setattr(profile, "_NOISY", 1e9)
    monkeypatch.setattr(worker, "share_of_a_core", lambda: 1.0)
    for room in (samples, timed_layers):
        monkeypatch.setattr(room, "timed", lambda run, device, budget=0.0: timed(run, device, 0.01))


def test_what_is_written_is_a_cluster_that_plans_use(small: None, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    told: list[str] = []
    found = measure(str(path), 1, lambda name, done, of: told.append(name))
    assert told[0] == "products, fp32"
    assert told[-1] == "done"
    loaded = mw.Cluster.load(path)
    assert found == loaded
    seen = loaded.device(0).measured
    assert seen is not None
    assert seen.issues_alone
    assert seen.memory
    assert not list(tmp_path.glob("*.partial.json"))
    job = mw.Job(mw.Model.preset("tiny-llama"), loaded, 4, seq_len=32, precision="fp32")
    priced, plain = (
        mw.estimate(mw.Job(job.model, c, 4, 32, "fp32"), {}) for c in (loaded, mw.Cluster.preset("local:1"))
    )
    assert priced.step_seconds != plain.step_seconds
    assert mw.plan(job).estimate


def test_an_interrupted_run_goes_on(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.toml"

    def stop(name: str, done: int, of: int) -> None:
        if name == "memory":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(str(path), 1, stop)
    assert not path.exists()
    kept = json.loads((tmp_path / "cluster.toml.partial.json").read_text())["done"]
    assert sorted(kept) == ["attention @ cpu", "products, fp32 @ cpu"]
    monkeypatch.setattr(samples, "products", lambda *_: pytest.fail("was measured before"))
    measure(str(path), 1)
    assert path.exists()


def test_timings_of_another_machine_are_not_used(small: None, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml.partial.json"
    path.write_text(json.dumps({"machine": {"torch": "0"}, "done": {"products, fp32 @ cpu": [{"kind": "x"}]}}))
    assert measure(str(tmp_path / "cluster.toml"), 1) is not None


def test_devices_of_one_machine_from_a_script_without_a_main_guard(small: None, tmp_path: Path) -> None:
    """Processes that multiprocessing starts would run the script again, and end in its lecture on main guards."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from meshwright.measurement import worker\n"
        "from tests.launchers import small\n"
        "print('once')\n"
        "worker._entry = small.entry\n"
        "worker.measure(sys.argv[1], 2)\n"
    )
    path = tmp_path / "cluster.toml"
    ran = subprocess.run(
        [sys.executable, str(script), str(path)],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("once") == 1
    assert mw.Cluster.load(path).devices == 2


def test_noise_is_named() -> None:
    calm = [Sample("addition", {"bytes": i}, Timing(1e-3, 0.02)) for i in range(9)]
    assert noise("memory", [*calm, Sample("addition", {"bytes": 9}, Timing(1e-3, 0.9))]) == ""
    wild = [Sample("addition", {"bytes": 2**i}, Timing(1e-3, 0.4 + i)) for i in range(3)]
    said = "3 of 12 timings spread by more than 35% of their median, most of all 'addition bytes=4' (240%)"
    assert noise("memory", [*calm, *wild]) == said
    assert noise("links inside nodes, 2 devices", wild[:1]) == ""


def test_noise_is_measured_again_before_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def once_calm() -> list[Sample]:
        tries.append(1)
        return [Sample("x", {"bytes": 1}, Timing(1.0, 0.9 if len(tries) < 3 else 0.1))]

    state = worker.State(tmp_path / "state.json", {})
    worker._measured("x", once_calm, ["cpu"], state, 1)
    assert len(tries) == 3
    assert state.done["x @ cpu"][0].timing.spread == 0.1
    assert state.notes == {}


def test_a_busy_machine_gets_a_file_that_says_so(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Noise to the end: every number is written, with a note that stays through an interruption."""
    monkeypatch.setattr(profile, "_NOISY", -1.0)
    monkeypatch.setattr(worker, "share_of_a_core", lambda: 0.4)
    path = tmp_path / "cluster.toml"

    def stop(name: str, done: int, of: int) -> None:
        if name == "memory":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(str(path), 1, stop)
    found = measure(str(path), 1)
    assert (
        capsys.readouterr().err.splitlines()[0]
        == "note: this machine is busy: a process gets 40% of its part of the cores"
    )
    assert found is not None
    seen = mw.Cluster.load(path).device(0).measured
    assert seen is not None
    for name in ("products, fp32", "attention", "memory", "optimizer", "launches", "blocks"):
        assert re.search(rf"{name}: \d+ of \d+ timings spread by more than -100% of their median", seen.how), name
    assert seen.products["fp32"].rate > 0
    assert seen.update


def test_what_does_not_fit_into_its_time_is_left_out(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One timing of each part: no curve goes through it, and the catalogue's stand in for it."""
    monkeypatch.setattr(worker, "_BUDGET", 0.0)
    path = tmp_path / "cluster.toml"
    assert measure(str(path), 1) == mw.Cluster.load(path)
    cluster = mw.Cluster.load(path)
    seen = cluster.device(0).measured
    assert seen is not None
    assert "products, fp32: 1 timings fitted into 0 s" in seen.how
    assert (seen.products, seen.memory, seen.kernel) == ({}, None, None)
    assert seen.update  # one timing is all of it
    assert mw.estimate(mw.Job(mw.Model.preset("tiny-llama"), cluster, 4, 32, "fp32"), {}).step_seconds > 0


def test_processes_end_a_measurement_at_the_same_timing() -> None:
    """The clock of the first decides: else one would wait for a collective of another that has ended."""
    counts = pool(2).run(_taken)
    assert len(set(counts)) == 1
    assert 1 <= counts[0][0] < 100
    assert not counts[0][1]


def _taken() -> tuple[int, bool]:
    def samples() -> Iterator[Sample]:
        for i in range(100):
            time.sleep(0.1)
            dist.barrier()
            yield Sample("x", {"i": i}, Timing(1.0, 0.0))

    late = 100.0 * dist.get_rank()  # another process believes that it has time
    found, whole = worker._until(samples(), time.monotonic() + 0.25 + late, 2)
    return len(found), whole


@pytest.mark.parametrize(
    ("path", "said"), [("cluster.json", "is no .toml file"), ("nowhere/cluster.toml", "no such folder")]
)
def test_mistakes_are_said_before_anything_is_timed(path: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        measure(str(tmp_path / path))


def test_layers_of_a_model_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    model = mw.Model.preset("tiny-moe")
    job = mw.Job(model, mw.Cluster.preset("1xcpu"), 2, seq_len=32, precision="fp32")
    rows = layers(job)
    assert sum(row.count for row in rows) == len(model.layers)
    blocks = [row for row in rows if row.name.startswith("block")]
    assert len(blocks) == 2
    assert all(row.seen.forward > 0 for row in rows)
    attention = next(row for row in rows if row.name.endswith("attention"))
    assert attention.seen.kept == pytest.approx(attention.expected.kept, rel=0.6)


def test_measured_numbers_take_the_place_of_usual_ones() -> None:
    """A chip that was seen to do half of what is usual takes twice as long for its products."""
    plain = mw.Cluster.preset("1xh100")
    table = {"group": [{"device": "h100", "nodes": 1, "devices_per_node": 1}]}
    from meshwright.cost.layers.operators import Chip
    from meshwright.cost.runtime import runtime

    usual = Chip.of(plain.device(0), "bf16", runtime("meshwright")).products
    half = {"tflops": usual.rate / 2e12, "half_k": usual.half_k, "half": usual.half, "floor_us": usual.floor * 1e6}
    slow = mw.Cluster.from_table({"group": [{**table["group"][0], "measured": {"product": {"bf16": half}}}]})
    chip = Chip.of(slow.device(0), "bf16", runtime("meshwright"), DEFAULT)
    assert chip.products.rate == pytest.approx(usual.rate / 2)
    assert chip.memory == Chip.of(plain.device(0), "bf16", runtime("meshwright")).memory
    job = mw.Job(mw.Model.preset("llama3.2-1b"), slow, 1, 4096)
    other = mw.Job(mw.Model.preset("llama3.2-1b"), plain, 1, 4096)
    ratio = mw.estimate(job, {}).breakdown["forward compute"] / mw.estimate(other, {}).breakdown["forward compute"]
    assert 1.5 < ratio < 2.0


def test_what_our_runtime_takes_to_issue_a_kernel_is_not_laid_on_others() -> None:
    row = {"device": "h100", "nodes": 1, "devices_per_node": 1}
    slow = mw.Cluster.from_table({"group": [{**row, "measured": {"launch_us": 1000.0}}]})
    plain = mw.Cluster.from_table({"group": [row]})
    ours, theirs = (
        [mw.estimate(mw.Job(mw.Model.preset("gpt2"), c, 1, 128), {}, name).step_seconds for c in (slow, plain)]
        for name in ("meshwright", "megatron")
    )
    assert ours[0] > 2 * ours[1]
    assert theirs[0] == theirs[1]


def test_an_unknown_precision_is_named() -> None:
    row = {"device": "h100", "nodes": 1, "measured": {"product": {"bf17": {"tflops": 1}}}}
    with pytest.raises(InputError, match=r"group\[0\].measured.product: unknown precision 'bf17'"):
        mw.Cluster.from_table({"group": [row]})


@pytest.mark.parametrize(("zero", "per_step", "per_micro_batch"), [(0, 0, 0), (1, 2, 0), (2, 1, 1), (3, 0, 3)])
def test_sharded_layers_take_the_time_of_the_host(zero: int, per_step: int, per_micro_batch: int) -> None:
    """Measured: two gathers and a scatter. ZeRO 1 does one of each in a step, ZeRO 3 all in every micro-batch."""
    row = {"device": "cpu", "nodes": 1, "devices_per_node": 2, "link": [{**LINK, "measured": AT_ONCE}]}
    plain, busy = (
        mw.Cluster.from_table({"group": [{**row, "measured": {"issues_alone": True, **more}}]})
        for more in ({}, {"shard_us": 6000.0})
    )

    def step(cluster: mw.Cluster) -> float:
        job = mw.Job(mw.Model.preset("tiny-llama"), cluster, 8, 64, "fp32")
        return mw.estimate(job, {"dp": 2, "zero": zero, "micro_batches": 4}).step_seconds

    each = 2e-3 * len(mw.Model.preset("tiny-llama").layers)
    assert step(busy) - step(plain) == pytest.approx((per_step + 4 * per_micro_batch) * each, rel=0.01)


def test_nothing_hides_on_processors() -> None:
    """`fully_shard` waits for its collectives there: a slower link delays the whole step by what it is slower."""
    row = {"device": "cpu", "nodes": 1, "devices_per_node": 2, "measured": {"issues_alone": True}}
    times = []
    for rate in (1.0, 0.5):
        seen = {**AT_ONCE, "gather_gb_s": rate}
        cluster = mw.Cluster.from_table({"group": [{**row, "link": [{**LINK, "measured": seen}]}]})
        job = mw.Job(mw.Model.preset("tiny-llama"), cluster, 8, 64, "fp32")
        times.append(mw.estimate(job, {"dp": 2, "zero": 1, "micro_batches": 1}).step_seconds)
    moved = 2 * 4 * job.model.parameters / 2  # gradients scattered, parameters gathered: half of float32 each way
    assert times[1] - times[0] == pytest.approx(moved * 1e-9, rel=1e-3)


def test_blocks_say_how_much_slower_kernels_are_in_them() -> None:
    """Blocks that took twice what the curves expect make every rate half as high, and leave what is no kernel."""
    row = {"device": "cpu", "nodes": 1, "devices_per_node": 1, "measured": {
        "issues_alone": True, "memory_gb_s": 10.0, "cached_gb_s": 40.0, "cache_mib": 1.0, "norm_gb_s": 5.0, "launch_us": 0.0,
        "kernel_us": 0.0, "product": {"fp32": {"tflops": 0.1}}, "attention": {"fp32": {"tflops": [0.05, 0.05]}},
    }}  # fmt: skip

    cluster = mw.Cluster.from_table({"group": [row]})
    once = Sample("block", {"width": 128, "tokens": 64}, Timing(1.0, 0.0))
    alone = 1.0 / beside_kernels([once], cluster, "cpu")  # seconds that the curves expect
    assert beside_kernels([Sample("block", once.facts, Timing(2 * alone, 0.0))], cluster, "cpu") == pytest.approx(2.0)
    halved = mw.Cluster.from_table({"group": [{**row, "measured": profile.slower(row["measured"], 2.0)}]})
    assert beside_kernels([once], halved, "cpu") * 2 == pytest.approx(beside_kernels([once], cluster, "cpu"), rel=0.02)
