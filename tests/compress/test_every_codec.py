"""What every codec must do, whatever its algorithm: one suite for all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.compress import Codec
from meshwright.compress.native import compiler
from meshwright.compress.reference import decoded, encoded
from tests.compress.data import ALL, KINDS, SIZES, SPARSE, TYPED, both, called, numbers, received, sent

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
    counts = [40, 1030, 300, 0, 7]
    flat = numbers("normal", sum(counts)).to(dtype)
    wrong = flat.clone()
    wrong[40 + 1029] = bad
    for batch in both(one, counts, dtype) if compiler() else [one.batch(counts, dtype=dtype)]:
        residual, clean_residual = torch.full((sum(counts),), 0.25), torch.full((sum(counts),), 0.25)
        message, clean = sent(batch, wrong, residual), sent(batch, flat, clean_residual)
        assert batch.flags(message).ne(0).tolist() == [False, True, False, False, False]
        assert not batch.flags(clean).any()
        if one.program.agrees is not None:  # is found anew by each encode
            message = sent(batch, wrong, torch.full((sum(counts),), 0.25))
        out = received(batch, message)
        assert out.isfinite().all()
        assert out[40:1070].abs().max() == 0
        assert torch.equal(residual[40:1070], torch.full((1030,), 0.25))
        assert torch.equal(residual[:40], clean_residual[:40])
        assert torch.equal(residual[1070:], clean_residual[1070:])
        kept = [i for i in range(len(counts)) if i != 1]
        for i in kept:
            here = slice(batch.places[i], batch.places[i + 1])
            assert torch.equal(message[here], clean[here])
        assert batch.flags(sent(batch, wrong)).ne(0).tolist() == [False, True, False, False, False]


@every_codec
def test_a_large_gradient_is_told_to_be_bad_wherever_the_number_is(one: Codec) -> None:
    batch = one.batch([200_000])
    flat = numbers("normal", 200_000)
    flat[131_071] = float("nan")
    for residual in (None, torch.ones(200_000)):
        message = sent(batch, flat, residual)
        assert batch.flags(message).tolist() == [1]
        assert received(batch, message).abs().max() == 0
        assert residual is None or bool((residual == 1).all())


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
