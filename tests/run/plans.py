"""Plans that only the full form can say: stages of several strategies, stages of other sizes, several pipelines."""

from __future__ import annotations

from math import prod
from typing import Any

from hypothesis import strategies as st


def stage(devices: str, *spans: dict[str, Any]) -> dict[str, Any]:
    return {"devices": devices, "spans": list(spans)}


def pipeline(
    *stages: dict[str, Any], batch: int = 8, micro_batches: int = 2, schedule: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "batch": batch, "micro_batches": micro_batches, "stages": list(stages), "schedule": schedule or {"name": "1f1b"},
    }  # fmt: skip


def span(layers: str, **strategy: Any) -> dict[str, Any]:
    return {"layers": layers, **strategy}


_EVERY = "embed..head"
_OFF = {"gradients": False, "parameters": False, "pipeline": False}
FULL: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "two spans: tp, then dp": (
        {"world": 2, "pipelines": [pipeline(
            stage("0-1", span("embed..block.0", tp=2, sp=True), span("block.1..head", dp=2)))]},
        ("llama", "gpt2", "qwen3-moe"),
    ),
    "three spans: ring, tp without sp, zero 3": (
        {"world": 2, "pipelines": [pipeline(
            stage("0-1", span("embed", ring=2), span("block.0", tp=2), span("block.1..head", dp=2, zero=3)))]},
        ("llama", "qwen3"),
    ),
    "a tied head cut otherwise than the embedding": (
        {"world": 4, "pipelines": [pipeline(
            stage("0-3", span("embed..block.0", tp=4, sp=True), span("block.1..head", dp=2, tp=2)))]},
        ("llama-tied", "gpt2"),
    ),
    "attention by Ulysses, feed-forward by tp": (
        {"world": 2, "pipelines": [pipeline(
            stage("0-1", span("embed..block.0.attention", ulysses=2), span("block.0.mlp", tp=2, sp=True),
                  span("block.1.attention", ulysses=2, zero=1), span("block.1.mlp..head", tp=2)))]},
        ("llama",),
    ),
    "stages of one and three processes": (
        {"world": 4, "pipelines": [pipeline(
            stage("0", span("embed..block.0")), stage("1-3", span("block.1..head", dp=3, shares=[1, 2, 1])))]},
        ("llama", "llama-tied"),
    ),
    "a large stage before a small one": (
        {"world": 6, "pipelines": [pipeline(
            stage("0-3", span("embed..block.0", dp=2, tp=2, sp=True, zero=1)),
            stage("4-5", span("block.1..head", ring=2)))]},
        ("llama", "qwen3-moe"),
    ),
    "uneven shares under zero 3": (
        {"world": 2, "pipelines": [pipeline(stage("0-1", span(_EVERY, dp=2, shares=[3, 1], zero=3)))]},
        ("llama", "qwen3-moe"),
    ),
    "uneven shares of processes that cut experts together": (
        {"world": 4, "pipelines": [pipeline(
            stage("0-3", span(_EVERY, dp=4, shares=[3, 1, 2, 2], etp=2)), micro_batches=1)]},
        ("qwen3-moe",),
    ),
    "uneven stages": (
        {"world": 3, "pipelines": [pipeline(
            stage("0", span("embed..block.0.attention")), stage("1", span("block.0.mlp..block.2")),
            stage("2", span("block.3..head")), micro_batches=4)]},
        ("llama-deep", "tied-deep"),
    ),
    "stages cut differently under zero bubble": (
        {"world": 4, "pipelines": [pipeline(
            stage("0-1", span("embed..block.1", tp=2, sp=True)), stage("2-3", span("block.2..head", dp=2, zero=1)),
            micro_batches=4, schedule={"name": "zero-bubble"})]},
        ("llama-deep",),
    ),
    "a V whose bottom changes its cut": (
        {"world": 4, "pipelines": [pipeline(
            stage("0-1", span("embed..block.0", dp=2)), stage("2-3", span("block.1", tp=2, sp=True)),
            stage("2-3", span("block.2", dp=2)), stage("0-1", span("block.3..head", tp=2)),
            micro_batches=4, schedule={"name": "zbv", "virtual": 2})]},
        ("llama-deep", "moe-deep"),
    ),
    "a table of one's own": (
        {"world": 2, "pipelines": [pipeline(
            stage("0", span("embed..block.1")), stage("1", span("block.2..head")), schedule={
                "name": "custom",
                "table": [["0F0", "0F1", "0B0", "0I1", "0W1"], ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]]})]},
        ("llama-deep",),
    ),
    "two pipelines, one of two stages": (
        {"world": 3, "pipelines": [
            pipeline(stage("0", span("embed..block.0")), stage("1", span("block.1..head")), batch=6, micro_batches=3),
            pipeline(stage("2", span(_EVERY)), batch=2, micro_batches=1)]},
        ("llama", "llama-tied"),
    ),
    "two pipelines, cut differently": (
        {"world": 4, "pipelines": [
            pipeline(stage("0-1", span(_EVERY, tp=2, sp=True)), batch=4, micro_batches=2),
            pipeline(stage("2-3", span(_EVERY, dp=2, zero=3)), batch=4, micro_batches=1)]},
        ("llama", "qwen3-moe"),
    ),
    "three pipelines with experts folded": (
        {"world": 6, "pipelines": [
            pipeline(stage("0-1", span(_EVERY, dp=2, ep=2)), batch=4, micro_batches=1),
            pipeline(stage("2-3", span(_EVERY, tp=2, ep=2, zero=0)), batch=2, micro_batches=1),
            pipeline(stage("4", span("embed..block.0")), stage("5", span("block.1..head")), batch=2, micro_batches=1)]},
        ("qwen3-moe",),
    ),
    "nothing hidden, plain replicas": ({"dp": 2, "overlap": _OFF}, ("llama-tied",)),
    "nothing hidden, zero 3": ({"dp": 2, "zero": 3, "overlap": _OFF}, ("llama", "qwen3-moe")),
    "nothing hidden in a pipeline": ({"pp": 2, "dp": 2, "zero": 2, "overlap": _OFF}, ("llama-deep",)),
    "nothing hidden in a V": (
        {"pp": 2, "schedule": "zbv", "virtual": 2, "micro_batches": 4, "dp": 2, "zero": 3, "overlap": _OFF},
        ("llama-deep",),
    ),
    "spans cut alike, sharded and repeated differently": (
        {"world": 8, "pipelines": [pipeline(stage(
            "0-7", span("embed", dp=2, tp=4, sp=True), span("block.0.attention", dp=2, tp=4, sp=True, zero=3),
            span("block.0.mlp", dp=2, tp=4, sp=True, zero=1, recompute="full"),
            span("block.1", dp=2, tp=4, sp=True, zero=2, recompute="selective", offload={"optimizer": 0.5}),
            span("norm..head", dp=2, tp=4, sp=True, zero=0, offload={"parameters": 1.0})))]},
        ("llama", "gpt2"),
    ),
    "sums in four chunks": ({"tp": 2, "sp": True, "overlap": {"tensor_chunks": 4}}, ("llama", "deepseek-v3")),
    "sums in two chunks, some repeated": (
        {"dp": 2, "zero": 3, "tp": 2, "sp": True, "recompute": ("norm", "gate", "core"), "overlap": {"tensor_chunks": 2}},
        ("llama", "qwen3"),
    ),
    "sums in three chunks, no sp": ({"tp": 4, "sp": False, "overlap": {"tensor_chunks": 3}}, ("gpt2", "qwen3")),
}  # fmt: skip


_CUTS = ["embed..block.0", "block.1", "block.2", "block.3..head"]  # of models of four blocks
_SCHEDULES = {
    1: [("1f1b", 1), ("gpipe", 1)],
    2: [("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1)],
    4: [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2), ("zbv", 2), ("dualpipev", 2)],
}


@st.composite
def drawn(draw: st.DrawFn) -> dict[str, Any]:
    """A random plan of up to eight devices; some break a rule."""
    count = draw(st.sampled_from([1, 2, 4]))
    name, virtual = draw(st.sampled_from(_SCHEDULES[count]))
    groups = count // virtual
    sizes = [draw(st.sampled_from([1, 2, 4] if groups <= 2 else [1, 2])) for _ in range(groups)]
    ends = [str(sum(sizes[:g])) + (f"-{sum(sizes[: g + 1]) - 1}" if sizes[g] > 1 else "") for g in range(groups)]
    stages = []
    for s in range(count):
        group = (s if s < groups else 2 * groups - 1 - s) if name in ("zbv", "dualpipev") else s % groups
        layers = [_CUTS[i] for i in range(4) if i * count // 4 == s]
        cut = draw(st.integers(0, len(layers) - 1)) if len(layers) > 1 else 0
        parts = [layers[:cut], layers[cut:]] if cut else [layers]
        spans = [
            span(f"{part[0].split('..')[0]}..{part[-1].split('..')[-1]}", **draw(_strategy(sizes[group])))
            for part in parts
        ]
        stages.append(stage(ends[group], *spans))
    micro_batches = draw(st.sampled_from([1, 2, 4] if groups == 1 else [2, 4]))
    one = pipeline(*stages, micro_batches=micro_batches, schedule={"name": name, "virtual": virtual})
    return {"world": sum(sizes), "pipelines": [one]}


@st.composite
def _strategy(draw: st.DrawFn, devices: int) -> dict[str, Any]:
    left, found = devices, {}
    for axis in draw(st.permutations(["tp", "ulysses", "ring"])):
        found[axis] = draw(st.sampled_from([d for d in (1, 2, 4) if left % d == 0]))
        left //= found[axis]
    found["dp"] = left
    found["order"] = draw(st.permutations(["tp", "ulysses", "ring", "dp"]))
    found["sp"] = found["tp"] > 1 and draw(st.booleans())
    found["zero"] = draw(st.sampled_from([0, 1, 2, 3]))
    replicas = prod(found[axis] for axis in ("dp", "ulysses", "ring"))
    if found["zero"] and replicas % 2 == 0:
        found["zero_group"] = draw(st.sampled_from([0, replicas // 2]))
    found["ep"] = draw(st.sampled_from([1, 1, 2]))
    return found
