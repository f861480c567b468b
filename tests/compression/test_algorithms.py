"""Each algorithm against its definition, written here once more."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.compression import codec
from tests.compression.data import CPU, numbers, received, sent

few = settings(max_examples=20, deadline=None)
counts = st.integers(1, 600)
seeds = st.integers(0, 10_000)


def through(name: str, flat: torch.Tensor, seed: int = 0, **options: object) -> torch.Tensor:
    batch = codec(name, **options).batch([flat.numel()])
    return received(batch, sent(batch, flat, seed=seed))


@few
@given(count=counts, seed=seeds)
def test_fp16_and_bf16_are_as_torch_rounds(count: int, seed: int) -> None:
    for kind in ("normal", "heavy", "tiny"):
        flat = numbers(kind, count, seed)
        assert torch.equal(through("fp16", flat), flat.clamp(-65504, 65504).half().float())
        assert torch.equal(through("bf16", flat), flat.bfloat16().float())


def test_every_half_is_kept() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        flat = every.view(dtype)
        flat = flat[flat.isfinite()]
        batch = codec(name).batch([flat.numel()], dtype=dtype)
        assert torch.equal(received(batch, sent(batch, flat), dtype), flat)


def test_halves_are_rounded_to_even_and_do_not_become_infinite() -> None:
    ties = torch.tensor(
        [1 + 2**-11, 1 + 3 * 2**-11, 2**-25, 3 * 2**-25, 65519.0, 65520.0, 1e9, -3.4e38, 2**-14 * (1 - 2**-12)]
    )
    assert torch.equal(through("fp16", ties), ties.clamp(-65504, 65504).half().float())
    assert through("bf16", torch.tensor([3.4e38])).isfinite().all()


@few
@given(count=counts, seed=seeds)
def test_onebit_is_sign_and_mean_magnitude(count: int, seed: int) -> None:
    flat = numbers("heavy", count, seed)
    scale = np.float32(np.abs(flat.numpy().astype(np.float64)).mean())
    assert np.allclose(through("onebit", flat).numpy(), np.where(flat.numpy() >= 0, scale, -scale), rtol=3e-7, atol=0)


@few
@given(count=counts, seed=seeds, kind=st.sampled_from(["normal", "heavy", "sparse"]))
def test_blocks_are_off_by_half_a_step_at_most(count: int, seed: int, kind: str) -> None:
    flat = numbers(kind, count, seed)
    for name, levels in (("int8", 127), ("int4", 7), ("int2", 2)):
        error = (through(name, flat, block=64) - flat).abs()
        for part, of in zip(error.split(64), flat.split(64), strict=True):
            assert part.max() <= of.abs().max() / levels / 2 * (1 + 1e-4)


@few
@given(count=counts, seed=seeds)
def test_tbq_sends_the_threshold_where_it_is_passed(count: int, seed: int) -> None:
    flat = numbers("heavy", count, seed).numpy()
    tau = 2 * np.abs(flat.astype(np.float64)).mean()
    wanted = np.where(np.abs(flat) > tau, np.sign(flat) * tau, 0)
    assert np.allclose(through("tbq", torch.from_numpy(flat)).numpy(), wanted, rtol=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_terngrad_is_right_on_average_and_has_its_levels(bits: int) -> None:
    flat = numbers("normal", 200)
    gap = float(flat.max() - flat.min()) / (2**bits - 1)
    rounds = torch.stack([through("terngrad", flat, seed, bits=bits) for seed in range(400)])
    codes = (rounds - flat.min()) / gap
    assert (codes - codes.round()).abs().max() < 1e-3
    assert codes.min() > -0.5
    assert codes.max() < 2**bits - 0.5
    # The mean of 400 has a standard deviation of at most gap / 2 / 20; five of those.
    assert (rounds.mean(0) - flat).abs().max() < 5 * gap / 40


@pytest.mark.parametrize("kind", ["normal", "heavy"])
@pytest.mark.parametrize("part", [0.001, 0.01, 0.1])
def test_topk_sends_the_largest(kind: str, part: float) -> None:
    flat = numbers(kind, 100_000)
    out = through("topk", flat, part=part)
    k, found = int(100_000 * part), int((out != 0).sum())
    assert 0.93 * k <= found <= k
    largest = np.argsort(-np.abs(flat.numpy()), kind="stable")[:found]
    assert set(out.nonzero().flatten().tolist()) == set(largest.tolist())
    assert torch.equal(out[largest], flat[largest])


@few
@given(count=st.integers(1, 60), seed=seeds)
def test_topk_of_few_sends_one_at_least(count: int, seed: int) -> None:
    flat = numbers("normal", count, seed)
    out = through("topk", flat)
    assert out.nonzero().flatten().tolist() == [int(flat.abs().argmax())]


def test_topk_of_equal_numbers_sends_the_first() -> None:
    assert through("topk", torch.full((1000,), -2.0)).nonzero().flatten().tolist() == list(range(10))
    assert not through("topk", torch.zeros(1000)).any()
    few_of_them = torch.zeros(1000)
    few_of_them[[3, 997]] = torch.tensor([1e-3, -5.0])
    assert torch.equal(through("topk", few_of_them), few_of_them)


@pytest.mark.parametrize("name", ["dgc", "graddrop"])
@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_a_sampled_threshold_finds_about_as_many(name: str, kind: str) -> None:
    flat = numbers(kind, 400_000)
    out = through(name, flat)
    chosen = out != 0
    assert 0.75 * 4000 <= int(chosen.sum()) <= 4000
    smallest = flat[chosen].abs().min()
    left_out = (flat.abs() > smallest * 1.02) & ~chosen
    assert int(left_out.sum()) < 400  # those that found no room, all of them at the end
    assert not left_out[: int(chosen.nonzero()[-1])].any()


def test_randomk_chooses_others_for_every_seed_and_each_as_often() -> None:
    flat = torch.ones(1000)
    chosen = torch.stack([through("randomk", flat, seed, part=0.1) for seed in range(300)])
    assert (chosen.sum(1) == 100).all()
    often = chosen.sum(0)  # expected 30 at most, standard deviation 5.2
    assert often.max() < 30 + 6 * 5.2
    assert often.min() > 30 - 6 * 5.2


@few
@given(count=counts, seed=seeds, part=st.sampled_from([0.003, 0.01, 0.07, 0.3, 0.6, 1.0]))
def test_randomk_takes_one_number_of_every_stretch(count: int, seed: int, part: float) -> None:
    """Stretches of equal lengths but for one number, the longer ones first; none is left out."""
    many = min(count, max(1, int(count * part)))
    chosen = through("randomk", torch.arange(1, count + 1).float(), seed, part=part)
    assert torch.equal(chosen[chosen != 0], chosen.nonzero()[:, 0] + 1.0)
    assert all(int((piece != 0).sum()) == 1 for piece in chosen.tensor_split(many))


def test_randomk_is_as_likely_to_take_each_number_of_a_stretch() -> None:
    flat = torch.ones(97)
    taken = torch.stack([through("randomk", flat, seed, part=0.001) for seed in range(2000)]).sum(0)
    assert taken.sum() == 2000
    squares = float(((taken - 2000 / 97) ** 2).sum() / (2000 / 97))  # expected 96, standard deviation 13.9
    assert squares < 96 + 5 * 13.9


@pytest.mark.parametrize(("bits", "members"), [(8, 4), (8, 1), (16, 8), (8, 127)])
def test_sums_of_homomorphic_messages_decode_to_the_sum(bits: int, members: int) -> None:
    one = codec("homomorphic", bits=bits, members=members)
    sizes = [33, 500, 0, 7]
    flats = [numbers("heavy", sum(sizes), rank) for rank in range(members)]
    flats[0][40] = 1e4  # all are at the largest code at once
    for flat in flats:
        flat[41] = 1e4
    batches = [one.batch(sizes) for _ in flats]
    for batch, flat in zip(batches, flats, strict=True):
        batch.measure(flat)
    agreed = torch.stack([batch.agreed for batch in batches]).amax(0)
    messages, parts = [], torch.zeros(sum(sizes))
    for rank, (batch, flat) in enumerate(zip(batches, flats, strict=True)):
        batch.agreed.copy_(agreed)
        message = batch.new_message()
        batch.encode(flat, message, seed=rank, agreed=True)
        messages.append(message)
        parts += received(batch, message)
    word = {"i8": torch.int8, "i16": torch.int16}[one.program.sums]
    total = torch.stack([message.view(word) for message in messages]).sum(0, dtype=word).view(torch.uint8)
    out = received(batches[0], total)
    assert torch.allclose(out, parts, rtol=1e-4, atol=1e-4 * float(agreed.max()))
    step = agreed[1] / ((2 ** (bits - 1) - 1) // members)
    assert (out[33:533] - sum(flats)[33:533]).abs().max() <= members * step * 1.001


def test_a_bad_number_of_one_process_is_seen_in_the_sum() -> None:
    one = codec("homomorphic")
    batches = [one.batch([10, 10]) for _ in range(3)]
    total = torch.zeros(batches[0].bytes, dtype=torch.int8)
    for rank, batch in enumerate(batches):
        flat = torch.ones(20)
        flat[12] = float("nan") if rank < 2 else 1.0
        batch.measure(flat)
        assert batch.agreed.tolist() == [1.0, 1.0]
        batch.agreed.fill_(1)
        message = batch.new_message()
        batch.encode(flat, message, agreed=True)
        total += message.view(torch.int8)
    assert batches[0].flags(total.view(torch.uint8)).tolist() == [0, 2]
    assert torch.allclose(received(batches[0], total.view(torch.uint8)), torch.tensor([3.0] * 12 + [1.0] + [3.0] * 7))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_halves_can_be_added_as_they_are(name: str) -> None:
    one = codec(name)
    assert one.summable
    batch = one.batch([100])
    flats = [numbers("normal", 100, rank) for rank in range(2)]
    word = {"f16": torch.float16, "bf16": torch.bfloat16}[one.program.sums]
    total = sum(sent(batch, flat).view(word) for flat in flats).view(torch.uint8)
    assert torch.allclose(received(batch, total), flats[0] + flats[1], rtol=2e-2, atol=1e-4)
    assert batch.device == CPU


def test_only_these_can_be_added() -> None:
    names = ["fp16", "bf16", "homomorphic", "int8", "onebit", "terngrad", "topk"]
    assert [codec(name).summable for name in names] == [True, True, True, False, False, False, False]
