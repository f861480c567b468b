"""Random valid plans, made from the rules themselves rather than by the code under test."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from meshwright.models import Model

# model, heads, experts, longest tp, sequence
MODELS = [
    ("tiny-llama", 8, 1, 256),
    ("tiny-gpt2", 4, 1, 256),
    ("tiny-moe", 8, 8, 256),
    ("llama3-8b", 32, 1, 8192),
    ("qwen3-30b-a3b", 32, 128, 4096),
    ("deepseek-v3", 128, 256, 4096),
]


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def degrees(draw: st.DrawFn, devices: int, heads: int, experts: int, samples: int) -> dict[str, Any]:
    """dp x tp x ulysses x ring = devices, every rule kept."""
    powers = [d for d in divisors(devices) if d & (d - 1) == 0]
    tp = draw(st.sampled_from([d for d in powers if heads % d == 0 and d <= 4]))
    ulysses = draw(
        st.sampled_from([d for d in powers if devices % (tp * d) == 0 and heads % (tp * d) == 0 and tp * d <= 4])
    )
    ring = draw(st.sampled_from([d for d in powers if devices % (tp * ulysses * d) == 0 and d <= 2]))
    dp = devices // (tp * ulysses * ring)
    if samples % dp:
        tp, ulysses, ring, dp = 1, 1, 1, devices
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    span: dict[str, Any] = {"dp": dp, "tp": tp, "ulysses": ulysses, "ring": ring, "zero": zero}
    span["sp"] = draw(st.booleans()) if tp > 1 else False
    if zero and draw(st.booleans()):
        span["zero_group"] = draw(st.sampled_from(divisors(dp * ulysses * ring)))
    if experts > 1:
        span["ep"] = draw(st.sampled_from([d for d in divisors(devices) if experts % d == 0]))
    span["recompute"] = draw(st.sampled_from(["none", "selective", "full", ["norm"], ["norm", "proj"]]))
    if draw(st.booleans()):
        span["offload"] = {"activations": draw(st.floats(0, 1)), "optimizer": draw(st.sampled_from([0.0, 0.5, 1.0]))}
    if draw(st.booleans()):
        span["order"] = draw(st.permutations(["tp", "ulysses", "ring", "dp"]))
    return span


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    """The table of a full plan: any model, 1-4 groups, virtual stages, spans that differ."""
    name, heads, experts, seq = draw(st.sampled_from(MODELS))
    model = Model.preset(name)
    groups = draw(st.sampled_from([1, 2, 4]))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]))
    virtual = 2 if schedule in {"interleaved", "zbv", "dualpipev"} else 1
    while groups * virtual > len(model.layers):
        groups //= 2
    each = draw(st.sampled_from([1, 2, 4, 8]))
    samples = 8
    micro_batches = draw(st.sampled_from([1, 2, 4])) * groups * virtual
    cuts = sorted(
        draw(
            st.sets(st.integers(1, len(model.layers) - 1), min_size=groups * virtual - 1, max_size=groups * virtual - 1)
        )
    )
    stages = []
    for s, (first, last) in enumerate(zip([0, *cuts], [*cuts, len(model.layers)], strict=True)):
        group = s if s < groups else (2 * groups - 1 - s if schedule in {"zbv", "dualpipev"} else s % groups)
        middle = draw(st.integers(first + 1, last - 1)) if last - first > 1 and draw(st.booleans()) else last
        spans = []
        for a, b in ((first, middle), (middle, last)):
            if a < b:
                layers = model.layers[a].name if b == a + 1 else f"{model.layers[a].name}..{model.layers[b - 1].name}"
                one = draw(degrees(each, heads, experts, samples))
                known = {n for layer in model.layers[a:b] for n in layer.op_names}
                if isinstance(one["recompute"], list) and not set(one["recompute"]) <= known:
                    one["recompute"] = "none"
                spans.append({"layers": layers, **one})
        stages.append(
            {"devices": f"{group * each}-{group * each + each - 1}" if each > 1 else f"{group}", "spans": spans}
        )
    job = {"model": name, "cluster": f"{groups}x{each}xh100", "global_batch": samples * micro_batches, "seq_len": seq}
    pipeline = {"batch": samples * micro_batches, "micro_batches": micro_batches, "stages": stages}
    pipeline["schedule"] = {"name": schedule, "virtual": virtual}
    plan: dict[str, Any] = {"format": "meshwright-plan", "version": 1, "job": job, "pipelines": [pipeline]}
    if draw(st.booleans()):
        plan["compression"] = [{"layers": model.layers[0].name, "algorithm": "topk", "options": {"ratio": 0.01}}]
    if draw(st.booleans()):
        plan["backup"] = {"scheme": "neighbour", "every": 3}
    return plan
