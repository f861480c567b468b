"""Rules on divisibility: heads, widths, experts, the sequence, the replicas."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.models import Layer
from meshwright.plans.rules.case import Broken, Case
from meshwright.plans.strategy import Span


def tensor_parallel(case: Case) -> Iterator[Broken]:
    """Check that layers without known operators run whole: no tensor or sequence cut."""
    for field, _, _, span in case.spans:
        if span.tp * span.ulysses * span.ring == 1:
            continue
        for layer in case.layers(span):
            if not layer.tensor_parallel:
                problem = f"{layer.name} was traced from a module and cannot be cut by tp, ulysses or ring"
                yield Broken(field, problem, "tp, ulysses and ring of 1")
                break


def heads(case: Case) -> Iterator[Broken]:
    """Check that tp x ulysses divides the attention heads.

    It must also divide the key/value heads, or be a multiple of them.
    """
    for field, _, _, span in case.spans:
        cut = span.tp * span.ulysses
        for layer in case.layers(span):
            if not layer.heads:
                continue
            if layer.heads % cut:
                product = f"tp {span.tp} x ulysses {span.ulysses} = {cut}"
                problem = f"{product} does not divide the {layer.heads} heads of {layer.name}"
                yield Broken(field, problem, f"a divisor of {layer.heads}")
                break
            if layer.kv_heads % cut and cut % layer.kv_heads:
                problem = f"tp x ulysses = {cut} does not fit the {layer.kv_heads} key/value heads of {layer.name}"
                yield Broken(field, problem, f"a divisor or a multiple of {layer.kv_heads}")
                break


def widths(case: Case) -> Iterator[Broken]:
    """Check that tp divides the width of every feed-forward layer, and etp that of every expert."""
    for field, _, _, span in case.spans:
        for layer in case.layers(span):
            if broken := _width(field, span, layer):
                yield broken
                break


def _width(field: str, span: Span, layer: Layer) -> Broken | None:
    for op in layer.ops:
        if op.name in {"down", "shared_down"} and op.k % span.tp:
            return Broken(
                f"{field}.tp", f"{span.tp} does not divide the width {op.k} of {layer.name}", f"a divisor of {op.k}"
            )
        if op.name == "expert_down" and op.k % span.etp:
            problem = f"{span.etp} does not divide the expert width {op.k} of {layer.name}"
            return Broken(f"{field}.etp", problem, f"a divisor of {op.k}")
    return None


def experts(case: Case) -> Iterator[Broken]:
    """Check that ep divides the experts, and that the expert grid folds onto the stage's devices."""
    has_experts = any(layer.experts for layer in case.job.model.layers)
    for field, _, _, span in case.spans:
        if span.ep * span.etp > 1 and not has_experts:
            name = "ep" if span.ep > 1 else "etp"
            yield Broken(f"{field}.{name}", f"is {getattr(span, name)}; {case.job.model.name} has no experts", "1")
            continue
        for layer in case.layers(span):
            if layer.experts and layer.experts % span.ep:
                problem = f"{span.ep} does not divide the {layer.experts} experts of {layer.name}"
                yield Broken(f"{field}.ep", problem, f"a divisor of {layer.experts}")
                break
        if span.devices % (span.ep * span.etp):
            problem = f"ep {span.ep} x etp {span.etp} does not divide the {span.devices} devices of the stage"
            yield Broken(f"{field}.{'ep' if span.ep > 1 else 'etp'}", problem, f"a product that divides {span.devices}")


def sequence(case: Case) -> Iterator[Broken]:
    """Check that all cuts divide the sequence; a ring needs two pieces per device to balance a causal mask."""
    for field, _, _, span in case.spans:
        if span.sp and span.tp == 1:
            yield Broken(f"{field}.sp", "sequence parallelism needs tensor parallelism", "false, or tp above 1")
            continue
        cut = span.sequence_pieces
        lengths = {layer.length(case.job.seq_len) for layer in case.layers(span)}
        bad = sorted(length for length in lengths if length % cut)
        if bad:
            parts = f"ulysses {span.ulysses} x ring {span.ring}" + (f" x tp {span.tp} (sp)" if span.sp else "")
            yield Broken(field, f"{parts} cuts the sequence into {cut} pieces, which does not divide {bad[0]} tokens")


def zero_groups(case: Case) -> Iterator[Broken]:
    """Check that a ZeRO group is a part of the replicas, and that only ZeRO has one."""
    for field, _, _, span in case.spans:
        if span.zero_group and not span.zero:
            yield Broken(f"{field}.zero_group", "is set, but zero is 0", "0, or a zero level of 1 to 3")
        elif span.zero_group and span.replicas % span.zero_group:
            problem = f"{span.zero_group} does not divide the {span.replicas} replicas (dp x ulysses x ring)"
            yield Broken(f"{field}.zero_group", problem, f"a divisor of {span.replicas}")
        elif span.zero_group and any(layer.experts for layer in case.layers(span)):
            small, large = sorted((span.zero_group, span.expert_replicas))
            if large % small:
                problem = f"{span.zero_group} does not fit the {span.expert_replicas} replicas of the experts"
                yield Broken(f"{field}.zero_group", problem, f"a divisor or a multiple of {span.expert_replicas}")
