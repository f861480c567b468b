"""Training with compressed gradients: near one process where codecs are nearly exact, and nothing is lost where not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

import meshwright as mw
from meshwright.errors import InputError
from meshwright.plans import Compression
from meshwright.run.folder.checkpoint.checkpoint import Checkpoints, latest
from meshwright.run.optimizers.choose import optimizer_for
from meshwright.run.parallel.apply import apply
from meshwright.run.parallel.refusals import refuse
from tests.run.families import CONFIGS
from tests.run.parity import GROUPS, batches, by_one_process, optimizer_of, plan_of, world_of
from tests.run.pool import pool

PLANS = [
    ("dp=2", "llama"),
    ("dp=2,zero=1", "llama-tied"),
    ("dp=2,zero=2,micro_batches=1", "gpt2"),
    ("dp=2,zero=3,micro_batches=1", "llama"),
    ("dp=4,zero=1,zero_group=2", "llama"),
    ("dp=4,zero=3,zero_group=2,micro_batches=1", "qwen3-moe"),
    ("dp=2,tp=2,sp=true", "llama"),
    ("dp=2,tp=2,zero=1", "gpt2"),
    ("dp=2,pp=2", "llama-tied"),
    ("dp=2,pp=2,zero=1,schedule=zero-bubble", "gpt2-deep"),
    ("dp=2,ring=2", "llama"),
    ("dp=4,ep=2", "qwen3-moe"),
]


def packed(table: str, config: dict[str, Any], algorithm: str, layers: str = "embed..head", **options: Any) -> Any:
    model, plan = plan_of(table, config)
    rule = Compression(layers=layers, algorithm=algorithm, options=options)
    return model, msgspec.structs.replace(plan, compression=(rule,))


def closed(part: Any) -> None:
    """End the threads. Connections stay: PyTorch names groups by how many there are, and would give one name twice."""
    for sync in part.synchronisers():
        sync._engine.close()


def near_one_process(table: str, config: dict[str, Any], algorithm: str) -> tuple[Any, Any, dict[str, float], int]:
    """Losses of three steps, those of one process, how far the first gradients are off as a part of the largest, and bytes
    that were sent."""
    model, plan = packed(table, config, algorithm)
    expected, reference = by_one_process(model, "packed")[0], by_one_process(model, "packed", steps=1)[1]
    part = apply(model, plan, seed=7, groups=GROUPS)
    optimizer = optimizer_of(part.parameters())
    losses, errors = [], dict[str, float]()
    for step, (tokens, documents) in enumerate(batches("packed")):
        optimizer.zero_grad()
        losses.append(part.step(part.micro_batches(tokens, documents), tokens.numel()).loss)
        for key, box, grad in pieces(part) if step == 0 else ():
            most = reference[key].abs().max().clamp(min=1e-8)
            away = (grad - reference[key][tuple(slice(*interval) for interval in box)]).abs().max() / most
            errors[key] = max(errors.get(key, 0.0), float(away))
        optimizer.step()
    sent = sum(sync.traffic.sent for sync in part.synchronisers())
    closed(part)
    return losses, expected, errors, sent


def pieces(part: Any) -> Iterator[tuple[str, Any, torch.Tensor]]:
    """Names, boxes and gradients of what this process has."""
    for span in part.spans:
        for key, module, kind in span.decoder.named():
            for box, grad in span.layouts[key].pieces(getattr(module, kind).grad):
                yield key, box, grad


@pytest.mark.parametrize(("table", "name"), PLANS)
def test_half_precision_is_near_one_process(table: str, name: str) -> None:
    world = world_of(plan_of(table, CONFIGS[name])[1])
    for losses, expected, errors, sent in pool(world).run(near_one_process, table, CONFIGS[name], "fp16"):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert max(errors.values()) < 1e-3, max(errors, key=errors.__getitem__)
        assert sent > 0


def steps_of(table: str, config: dict[str, Any], algorithm: str, steps: int) -> tuple[Any, Any, int]:
    """Without updates: sums over steps of what was applied and of what it should be, by piece; what is unsaid by name;
    and bytes of the last step."""
    model, plan = packed(table, config, algorithm) if algorithm else plan_of(table, config)
    part = apply(model, plan, seed=7, groups=GROUPS)
    total: dict[Any, Any] = {}
    before = 0
    for step in range(steps):
        tokens, documents = batches("packed")[step]
        for weight in part.parameters():
            weight.grad = None
        before = sum(sync.traffic.sent for sync in part.synchronisers())
        part.step(part.micro_batches(tokens, documents), tokens.numel())
        for key, box, grad in pieces(part):
            total[key, box] = total.get((key, box), 0) + grad.detach().double().numpy()
    left = unsaid(part) if algorithm else {}
    sent = sum(sync.traffic.sent for sync in part.synchronisers()) - before
    closed(part)
    return total, left, sent


def unsaid(part: Any) -> dict[str, np.ndarray]:
    """What this process has not said of every parameter it has a share of, as a whole; without tensor parallelism."""
    found: dict[str, np.ndarray] = {}
    for span in part.spans:
        names = {name: weight.key for name, weight in span.decoder.named_parameters()}
        for sync in span.synchronisers:
            shares: dict[str, list[np.ndarray]] = {}
            for name, value in sync.state().items():
                what, _, rest = name.partition("/")
                if what == "residual":
                    shares.setdefault(rest.partition("/")[0], []).append(value.double().numpy())
            for name, parts in shares.items():
                shape = span.layouts[names.get(name, name)].shape
                found[names.get(name, name)] = np.concatenate(parts)[: int(np.prod(shape))].reshape(shape)
    return found


@pytest.mark.parametrize("algorithm", ["onebit", "int4", "topk", "terngrad"])
@pytest.mark.parametrize("table", ["dp=2", "dp=2,zero=1", "dp=2,zero=3,micro_batches=1", "dp=4,zero=1"])
def test_what_is_not_said_is_said_later(table: str, algorithm: str) -> None:
    """What was applied plus what residuals hold is the sum of all gradients."""
    config = CONFIGS["llama"]
    world = world_of(plan_of(table, config)[1])
    plain, found = (pool(world).run(steps_of, table, config, name, 3) for name in ("", algorithm))
    lost = 0.0
    for rank in range(world):
        for (key, box), applied in found[rank][0].items():
            where = tuple(slice(*interval) for interval in box)
            left = sum(one[1][key][where] for one in found)
            wanted = plain[rank][0][key, box]
            np.testing.assert_allclose(applied + left, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max(), err_msg=key)
            lost = max(lost, np.abs(left).max() / np.abs(wanted).max())
    assert lost > 0.01  # it is lossy indeed


@pytest.mark.parametrize("table", ["dp=2,micro_batches=1", "dp=2,micro_batches=4", "dp=2,zero=1,micro_batches=4"])
def test_gradients_are_compressed_once_a_step(table: str) -> None:
    """However many micro-batches; eight bits are a quarter, sent to the owner and (plain replicas) back to all."""
    model, _ = plan_of(table, CONFIGS["llama"])
    for _, _, sent in pool(2).run(steps_of, table, CONFIGS["llama"], "int8", 2):
        halves = 1 if "zero" in table else 2
        assert sent == pytest.approx(halves * model.parameters / 2, rel=0.15)


def after_steps(table: str, config: dict[str, Any], algorithm: str) -> dict[Any, Any]:
    model, plan = packed(table, config, algorithm)
    part = apply(model, plan, seed=7, groups=GROUPS)
    optimizer = optimizer_of(part.parameters())
    for tokens, documents in batches("packed"):
        optimizer.zero_grad()
        part.step(part.micro_batches(tokens, documents), tokens.numel())
        optimizer.step()
    found = {}
    for span in part.spans:
        for key, module, kind in span.decoder.named():
            for box, piece in span.layouts[key].pieces(getattr(module, kind).detach()):
                found[key, box] = piece.numpy().copy()
    closed(part)
    return found


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ("dp=2,tp=2,sp=false", "llama"),
        ("dp=2,tp=2,sp=true,zero=1", "gpt2"),
        ("dp=2,tp=2,sp=true", "deepseek-v3"),
        ("dp=2,tp=2,sp=true,ep=2", "qwen3-moe"),
        ("dp=4,zero=1,zero_group=2", "llama"),
    ],
)
@pytest.mark.parametrize("algorithm", ["onebit", "terngrad"])
def test_copies_stay_equal_to_the_last_bit(table: str, name: str, algorithm: str) -> None:
    first: dict[Any, Any] = {}
    shared = 0
    for found in pool(4).run(after_steps, table, CONFIGS[name], algorithm):
        for place, piece in found.items():
            shared += place in first
            np.testing.assert_array_equal(first.setdefault(place, piece), piece, err_msg=str(place))
    assert shared


def saved(table: str, config: dict[str, Any], rule: dict[str, Any], folder: str, start: int, stop: int) -> Any:
    """Losses of some steps, and whether everything was taken up; the state is read before and written after."""
    model, plan = packed(table, config, **rule)
    part = apply(model, plan, seed=7, groups=GROUPS)
    optimizer, checkpoints = optimizer_for("adamw", part, 1e-3, 0.1), Checkpoints(folder)
    whole = True
    if start:
        found, _ = latest(folder)
        assert found is not None
        whole = checkpoints.load(found, part, optimizer)
    losses = []
    for step in range(start, stop):
        tokens, documents = batches("packed")[step % 3]
        optimizer.zero_grad()
        losses.append(part.step(part.micro_batches(tokens, documents), tokens.numel()).loss)
        optimizer.step()
    checkpoints.save(stop, part, optimizer, {})
    checkpoints.wait()
    closed(part)
    return losses, whole


def trained(table: str, rule: dict[str, Any], folder: Path, start: int, stop: int) -> Any:
    world = world_of(plan_of(table, CONFIGS["llama"])[1])
    return pool(world).run(saved, table, CONFIGS["llama"], rule, str(folder), start, stop)[0]


RESUMED = [
    (table, algorithm)
    for table in ("dp=2", "dp=2,zero=1", "dp=4,zero=1,zero_group=2")
    for algorithm in ("onebit", "terngrad", "powersgd")
    if algorithm != "powersgd" or "zero" not in table  # which is refused
]


@pytest.mark.parametrize(("table", "algorithm"), RESUMED)
def test_the_same_plan_goes_on_to_the_last_bit(table: str, algorithm: str, tmp_path: Path) -> None:
    rule = {"algorithm": algorithm}
    whole, _ = trained(table, rule, tmp_path / "whole", 0, 6)
    first, _ = trained(table, rule, tmp_path / "parts", 0, 3)
    second, taken_up = trained(table, rule, tmp_path / "parts", 3, 6)
    assert first + second == whole
    assert taken_up
    names = FileSystemReader(tmp_path / "parts" / "step-00000006").read_metadata().state_dict_metadata
    assert any(name.startswith("compression.") for name in names)


@pytest.mark.parametrize("second", ["dp=4", "tp=2,dp=2", "dp=2,zero=3,micro_batches=1"])
def test_another_plan_goes_on_without_what_was_unsaid(second: str, tmp_path: Path) -> None:
    rule = {"algorithm": "int8"}
    whole, _ = trained("dp=2", rule, tmp_path / "whole", 0, 6)
    first, _ = trained("dp=2", rule, tmp_path / "parts", 0, 3)
    then, taken_up = trained(second, rule, tmp_path / "parts", 3, 6)
    assert first + then == pytest.approx(whole, rel=1e-3)
    assert not taken_up


@pytest.mark.parametrize(
    ("table", "rule", "told"),
    [
        ("dp=2", {"algorithm": "sign"}, r"compression\[0\].algorithm: unknown codec 'sign'"),
        ("dp=2", {"algorithm": "topk", "ratio": 0.1}, r"compression\[0\].options.topk: unknown option 'ratio'"),
        ("dp=2", {"algorithm": "int8", "topology": "star"}, r"compression\[0\].options.topology: is 'star'"),
        ("dp=2", {"algorithm": "int8", "block": "wide"}, r"compression\[0\].options.int8.block"),
        ("dp=2,zero=2", {"algorithm": "int8"}, "ZeRO-2 sums gradients of .* in every micro-batch"),
        ("dp=2,zero=1", {"algorithm": "powersgd"}, "powersgd needs whole gradients, ZeRO-1 cuts"),
        ("dp=2,zero=1", {"algorithm": "homomorphic"}, "homomorphic needs whole gradients"),
    ],
)
def test_what_cannot_be_compressed_is_refused_by_name(table: str, rule: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        refuse(packed(table, CONFIGS["llama"], **rule)[1])


def test_a_loss_scale_and_residuals_do_not_go_together() -> None:
    _, plan = packed("dp=2", CONFIGS["llama"], "int8")
    job = msgspec.structs.replace(plan.job, precision="fp16")
    with pytest.raises(InputError, match="the loss scale changes"):
        refuse(msgspec.structs.replace(plan, job=job))


def test_layers_that_are_not_named_are_exact() -> None:
    for errors, sent in pool(2).run(only_some, "dp=2", CONFIGS["llama"]):
        inside = {key: one for key, one in errors.items() if key.startswith("block.1.")}
        assert max(inside.values()) > 0.05
        assert max(one for key, one in errors.items() if key not in inside) < 1e-5
        assert sent > 0


def only_some(table: str, config: dict[str, Any]) -> tuple[dict[str, float], int]:
    """How far the first gradients are off, with one block in one bit."""
    model, plan = packed(table, config, "onebit", layers="block.1")
    reference = by_one_process(model, "packed", steps=1)[1]
    part = apply(model, plan, seed=7, groups=GROUPS)
    tokens, documents = batches("packed")[0]
    part.step(part.micro_batches(tokens, documents), tokens.numel())
    errors = {
        key: float((grad - reference[key]).abs().max() / reference[key].abs().max()) for key, _, grad in pieces(part)
    }
    sent = sum(sync.traffic.sent for sync in part.synchronisers())
    closed(part)
    return errors, sent


def test_a_run_says_what_another_plan_cannot_take_up(tmp_path: Path) -> None:
    """Two processes of their own, in four bits; then one, which has no replicas."""
    job = mw.Job(mw.Model.preset("tiny-llama"), mw.Cluster.preset("2xcpu"), 4, seq_len=32, precision="fp32")
    rules = {"compression": [{"layers": "embed..head", "algorithm": "int4"}]}
    two = mw.Plan.of({"dp": 2, **rules}, job)
    assert [one["loss"] for one in mw.train(two, steps=2, output=str(tmp_path)) if one["event"] == "step"]
    alone = mw.Job(job.model, mw.Cluster.preset("1xcpu"), 4, seq_len=32, precision="fp32")
    events = mw.train(mw.Plan.of(rules, alone), steps=3, output=str(tmp_path), resume=True)
    assert [one["name"] for one in events if one["event"] == "changed"] == ["compression"]
    assert [one["step"] for one in events if one["event"] == "step"] == [3]
