"""Two runs of jobs that never ran: what was changed is what is told, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from meshwright.traces.job.difference import Difference, difference
from meshwright.traces.rank.facts import RankFacts, digest
from meshwright.traces.reading import read_trace
from tests.conftest import ROOT
from tests.traces.jobs import Collective, Compute, Host, Op, Step, as_facts, simulate
from tests.traces.test_breakdown import event, trace_of
from tests.traces.test_rank_memory import memory

TRACES = ROOT / "tests/data/traces"
GEMM, NORM = "sm90_gemm_bf16", "layer_norm_kernel"


def run(
    seed: int, gemm: float = 1.0, transfer: int = 300_000, host: int = 0, more: Sequence[Op] = (), norm: str = NORM
) -> list[RankFacts]:
    """Two ranks, twelve steps; products spread by 1 % from step to step."""
    random = np.random.default_rng(seed)
    programs: list[list[Op]] = [[], []]
    for number in range(12):
        for program in programs:
            ns = int(2_000_000 * gemm * random.normal(1, 0.01))
            program += [Step(number), Compute(ns), Host(host), Compute(500_000, norm), *more]
            program.append(Collective((0, 1), transfer))
    return as_facts(simulate(programs))


def names(found: Difference) -> dict[str, list[tuple[str, str]]]:
    tables = ("parts", "classes", "collectives", "kernels", "memory")
    return {name: [(row.name, row.verdict) for row in rows] for name in tables if (rows := getattr(found, name))}


@pytest.mark.parametrize(
    "name", ["hta/a100_ddp_resnet_2rank_rank0", "tracelens/h100_qwen1.5_0.5b", "hta/cpu_only_gloo_rank34_of_300"]
)
def test_identical_runs(name: str) -> None:
    facts = [digest(read_trace(TRACES / f"{name}.json.gz"))]
    found = difference(facts, facts)
    assert not found.changed
    assert found.step.change == 0


@pytest.mark.parametrize("seed", range(8))
def test_runs_that_differ_by_chance(seed: int) -> None:
    assert names(difference(run(seed), run(100 + seed))) == {}


def test_slower_products() -> None:
    found = difference(run(1), run(2, gemm=1.1))
    assert names(found) == {
        "parts": [("compute", "slower")], "classes": [("product", "slower")], "kernels": [(GEMM, "slower")],
    }  # fmt: skip
    assert found.kernels[0].change == pytest.approx(200_000, rel=0.15)
    assert found.step.change == pytest.approx(200_000, rel=0.2)
    assert found.step.change > found.step.noise
    assert (found.kernels[0].count_before, found.kernels[0].count_after) == (1, 1)
    assert (found.steps, found.ranks) == ((12, 12), (2, 2))


def test_slower_collectives_and_hosts() -> None:
    found = difference(run(1), run(2, transfer=600_000))
    assert names(found)["collectives"] == [("all_reduce", "slower")]
    assert names(found)["parts"] == [("exposed", "slower")]
    found = difference(run(1, host=400_000), run(2))
    assert names(found) == {"parts": [("host_bound", "gone")]}
    found = difference(run(1, host=400_000), run(2, host=100_000))
    assert names(found) == {"parts": [("host_bound", "faster")]}


def test_kernels_that_come_and_go() -> None:
    found = difference(run(1), run(2, more=[Compute(90_000, "my_fused_rope")], norm="rms_norm_kernel"))
    verdicts = dict(names(found)["kernels"])
    assert verdicts == {NORM: "gone", "rms_norm_kernel": "new", "my_fused_rope": "new"}
    assert [row.change for row in found.kernels] == pytest.approx([-500_000, 500_000, 90_000])


def test_memory() -> None:
    def facts(total: int) -> RankFacts:
        return digest(trace_of([event("kernel", "k", 0, 5), memory(1, 10, 1, total)]))

    (row,) = difference([facts(1000)], [facts(4000)]).memory
    assert (row.before, row.after, row.verdict) == (1000, 4000, "more")
