"""What every codec must do, whatever its algorithm: one suite for all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.native import compiler
from meshwright.compression import Codec
from meshwright.compression.backends.numpy.reference import decoded, encoded
from tests.compression.data import ALL, KINDS, SIZES, SPARSE, TYPED, both, called, numbers, received, sent

every_codec = pytest.mark.parametrize("one", ALL, ids=called)
typed_codec = pytest.mark.parametrize(("one", "dtype"), TYPED, ids=[f"{called(one)}-{dtype}" for one, dtype in TYPED])
needs_compiler = pytest.mark.skipif(not compiler(), reason="no C compiler")
sizes = st.lists(st.one_of(st.integers(0, 70), st.sampled_from(SIZES)), min_size=1, max_size=4)
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=12, deadline=None)


@needs_compiler
@typed_codec
def test_c_and_numpy_agree_on_every_size(one: Codec, dtype: torch.dtype) -> None:
    native, portable = both(one, SIZES, dtype)
    flat = numbers("normal", sum(SIZES)).to(dtype)
    kept = numbers("normal", sum(SIZES), seed=1) * 0.1
    other = kept.clone()
    for residuals in [(None, None), (kept, other)]:
        mine, theirs = sent(native, flat, residuals[0], seed=3), sent(portable, flat, residuals[1], seed=3)
        assert torch.equal(mine, theirs)
    assert torch.equal(kept, other)
    for out in {dtype, torch.float32}:
        assert torch.equal(received(native, mine, out), received(portable, mine, out))
    mine, theirs = (torch.linspace(-1, 1, sum(SIZES)).to(dtype) for _ in range(2))
    message = sent(native, flat)
    portable.agreed.copy_(native.agreed)
    native.decode(message, mine, add=True)
    portable.decode(message, theirs, add=True)
    assert torch.equal(mine, theirs)


@needs_compiler
@every_codec
@few
@given(counts=sizes, kind=kinds, seed=seeds)
def test_c_and_numpy_agree_on_all_kinds_of_numbers(one: Codec, counts: list[int], kind: str, seed: int) -> None:
    native, portable = both(one, counts)
    flat = numbers(kind, sum(counts), seed % 1000)
    mine, theirs = torch.zeros(sum(counts)), torch.zeros(sum(counts))
    message = sent(native, flat, mine, seed)
    assert torch.equal(message, sent(portable, flat, theirs, seed))
    assert torch.equal(mine, theirs)
    assert torch.equal(received(native, message), received(portable, message))


@every_codec
@few
@given(count=st.sampled_from(SIZES), kind=st.sampled_from(["normal", "heavy", "zeros", "same", "sparse"]), seed=seeds)
def test_the_reference_agrees_up_to_rounding(one: Codec, count: int, kind: str, seed: int) -> None:
    batch = one.batch([count])
    flat = numbers(kind, count, seed % 1000)
    out = received(batch, sent(batch, flat, seed=seed)).numpy()
    agreed = float(batch.agreed[0])
    message, _ = encoded(one.program, flat.numpy(), seed=seed, agreed=agreed)
    wanted = decoded(one.program, message, count, agreed=agreed)
    # In another precision, a number near the border between two codes may get the other one.
    apart = np.abs(out - wanted) > 1e-6 * np.abs(wanted).max(initial=1e-30)
    assert apart.sum() <= count // 500 + 1, (out[apart], wanted[apart])


@every_codec
@few
@given(counts=sizes, kind=kinds, seed=seeds)
def test_nothing_is_lost_with_a_residual(one: Codec, counts: list[int], kind: str, seed: int) -> None:
    batch = one.batch(counts)
    flat, residual = numbers(kind, sum(counts), seed % 1000), numbers("normal", sum(counts), 5)
    encoded_numbers = flat + residual
    out = received(batch, sent(batch, flat, residual, seed))
    assert torch.equal(residual, encoded_numbers - out)
    if one.name in SPARSE and one.name != "graddrop":
        assert bool(((out == 0) | (out == encoded_numbers)).all())


@every_codec
@few
@given(counts=sizes, kind=kinds, seed=seeds)
def test_gradients_together_are_as_each_alone(one: Codec, counts: list[int], kind: str, seed: int) -> None:
    together = one.batch(counts)
    flat = numbers(kind, sum(counts), seed % 1000)
    message = sent(together, flat, seed=seed)
    alone = [sent(one.batch([count]), part, seed=seed) for count, part in zip(counts, flat.split(counts), strict=True)]
    assert torch.equal(message, torch.cat(alone))
    assert message.numel() == one.bytes(counts)


@typed_codec
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_bad_numbers_are_told_and_do_not_spread(one: Codec, bad: float, dtype: torch.dtype) -> None:
    """They are as numbers whose sum with the residual is 0, but they keep the residual."""
    counts, place = [40, 1030, 300, 0, 7], 40 + 1029
    flat = numbers("normal", sum(counts)).to(dtype)
    wrong, zero = flat.clone(), flat.clone()
    wrong[place], zero[place] = bad, -0.25
    results = []
    for batch in both(one, counts, dtype) if compiler() else [one.batch(counts, dtype=dtype)]:
        residual, expected = torch.full((sum(counts),), 0.25), torch.full((sum(counts),), 0.25)
        clean = sent(batch, zero, expected)
        wanted = received(batch, clean)
        message = sent(batch, wrong, residual)
        out = received(batch, message)
        results.append((message, residual))
        assert batch.flags(message).tolist() == [0, 1, 0, 0, 0]
        assert not batch.flags(clean).any()
        assert residual[place] == 0.25
        expected[place] = 0.25
        clean[batch.places[1]] = 1
        assert torch.equal(message, clean)
        assert torch.equal(out, wanted)
        assert torch.equal(residual, expected)
        assert batch.flags(sent(batch, wrong)).tolist() == [0, 1, 0, 0, 0]
    assert all(torch.equal(*pair) for pair in zip(results[0], results[-1], strict=True))


@every_codec
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_bad_residual_begins_again_from_zero(one: Codec, bad: float) -> None:
    counts = [40, 1030, 300]
    flat = numbers("normal", sum(counts))
    for batch in both(one, counts) if compiler() else [one.batch(counts)]:
        residual, expected = torch.full((sum(counts),), 1e-3), torch.full((sum(counts),), 1e-3)
        residual[700], expected[700] = bad, 0
        message, clean = sent(batch, flat, residual), sent(batch, flat, expected)
        assert batch.flags(message).tolist() == [0, 1, 0]
        clean[batch.places[1]] = 1
        assert torch.equal(message, clean)
        assert torch.equal(residual, expected)
        both_bad = flat.clone()
        both_bad[700], residual[700] = -bad, bad
        assert batch.flags(sent(batch, both_bad, residual)).tolist() == [0, 1, 0]
        assert residual[700] == 0
        assert not batch.flags(sent(batch, flat, residual)).any()


@every_codec
def test_a_sum_that_is_too_large_is_bad_and_keeps_its_residual(one: Codec) -> None:
    flat = numbers("normal", 100)
    flat[30] = 3e38
    for batch in both(one, [100]) if compiler() else [one.batch([100])]:
        residual = torch.zeros(100)
        residual[30] = 2e38
        assert batch.flags(sent(batch, flat, residual)).tolist() == [1]
        assert residual[30] == float(np.float32(2e38))
        assert residual.isfinite().all()


@every_codec
@few
@given(counts=sizes, kind=kinds, seed=seeds)
def test_back_ends_agree_on_bad_numbers(one: Codec, counts: list[int], kind: str, seed: int) -> None:
    """Any number of them, in gradients and residuals, also all."""
    rng, count = np.random.default_rng(seed), sum(counts)
    flat, kept = numbers(kind, count, seed % 1000), numbers("normal", count, 5)
    for buffer in (flat, kept):
        which = torch.from_numpy(rng.random(count) < rng.choice([0, 0.01, 0.3, 1]))
        buffer[which] = torch.from_numpy(rng.choice(np.float32([np.inf, -np.inf, np.nan]), count))[which]
    told = [not bool((a + b).isfinite().all()) for a, b in zip(flat.split(counts), kept.split(counts), strict=True)]
    results = []
    for batch in both(one, counts) if compiler() else [one.batch(counts)]:
        residual = kept.clone()
        message = sent(batch, flat, residual, seed)
        assert batch.flags(message).ne(0).tolist() == told
        assert received(batch, message).isfinite().all()
        assert residual.isfinite().all()
        results.append((message, residual, sent(batch, flat, None, seed)))
    assert all(torch.equal(*pair) for pair in zip(results[0], results[-1], strict=True))


@every_codec
def test_a_large_gradient_is_told_to_be_bad_wherever_the_number_is(one: Codec) -> None:
    batch = one.batch([200_000])
    flat = numbers("normal", 200_000)
    zero = flat.clone()
    flat[131_071], zero[131_071] = float("nan"), 0
    for kept in (None, torch.zeros(200_000)):
        message = sent(batch, flat, kept)
        assert batch.flags(message).tolist() == [1]
        assert kept is None or kept[131_071] == 0
        assert torch.equal(received(batch, message), received(batch, sent(batch, zero)))


@every_codec
def test_a_damaged_message_is_decoded_without_harm(one: Codec) -> None:
    batch = one.batch([100, 1000, 5])
    rng = np.random.default_rng(0)
    guarded = torch.full((1105 + 2048,), 3.0)
    for _ in range(10):
        message = torch.from_numpy(rng.integers(0, 256, batch.bytes, dtype=np.uint8))
        batch.decode(message, guarded[1024:-1024])
        assert bool((guarded[:1024] == 3).all())
        assert bool((guarded[-1024:] == 3).all())


@pytest.mark.parametrize("one", [one for one in ALL if one.name != "terngrad"], ids=called)
def test_error_feedback_makes_the_mean_right(one: Codec) -> None:
    """What was sent follows what was to be sent. TernGrad is right on average without; with it, its range would grow."""
    batch = one.batch([512])
    residual, total, steps = torch.zeros(512), torch.zeros(512), 60
    flat = numbers("normal", 512) * 1e3
    message, out = batch.new_message(), torch.zeros(512)
    for step in range(steps):
        batch.encode(flat, message, residual=residual, seed=step)
        batch.decode(message, out)
        total += out
    assert torch.allclose(total + residual, flat * steps, rtol=1e-3, atol=2e-2)
    if one.name not in SPARSE:
        assert residual.norm() < 0.3 * steps * flat.norm()
